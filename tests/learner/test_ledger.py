from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thundersyncrl.algorithms.estimator import CoefficientClass
from thundersyncrl.errors import CoefficientClassError, ContractError, PhaseError, StaleWorkError
from thundersyncrl.learner.ledger import Coefficients, Ledger
from thundersyncrl.records import GroupId, TrajectoryId

GROUP = GroupId(0, 0)
SHAPES = ((3,), (2, 2))
"""Of the trained parameters; a boundary tensor of shape [4] lies behind them in every source."""


def member(index: int, group: int = 0) -> TrajectoryId:
    return TrajectoryId(0, group, index)


def parameters(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


def source(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in (*SHAPES, (4,))]


def open_ledger(
    coefficient: CoefficientClass = CoefficientClass.AFFINE_GROUP, *, size: int = 3, version: int = 0
) -> Ledger:
    ledger = Ledger(parameters(), coefficient)
    ledger.begin(version)
    ledger.open_group(GROUP, [member(i) for i in range(size)])
    return ledger


def coefficients(rewards: list[float], advantages: list[float]) -> Coefficients:
    return Coefficients(
        rewards={member(i): r for i, r in enumerate(rewards)},
        advantages={member(i): a for i, a in enumerate(advantages)},
    )


ADVANTAGES: dict[CoefficientClass, Callable[[list[float]], list[float]]] = {
    CoefficientClass.KNOWN: lambda rewards: [2.0 * r - 1.0 for r in rewards],
    CoefficientClass.AFFINE_GROUP: lambda rewards: [1.5 * (r - sum(rewards) / len(rewards)) for r in rewards],
    CoefficientClass.AFFINE_BATCH: lambda rewards: [r - sum(rewards) / len(rewards) for r in rewards],
    CoefficientClass.BY_VALUE: lambda rewards: [max(-1.0, min(r**3, 0.5)) for r in rewards],
    CoefficientClass.ARBITRARY: lambda rewards: [r * (i + 1) for i, r in enumerate(rewards)],
}
REWARDS = st.lists(st.sampled_from([0.0, 1.0, 0.25, -2.0, 7.5]), min_size=2, max_size=6)


@given(REWARDS, st.sampled_from(list(CoefficientClass)), st.integers(0, 10_000))
def test_every_class_settles_to_the_sum_of_coefficient_times_source(
    rewards: list[float], coefficient: CoefficientClass, seed: int
) -> None:
    """Held, folded and final sources in any order: the total is sum_i A_i H_i, parameters and adjoints alike."""
    draw, size = random.Random(seed), len(rewards)
    advantages = ADVANTAGES[coefficient](rewards)
    ledger = open_ledger(coefficient, size=size)
    known = coefficient is CoefficientClass.KNOWN
    order = draw.sample(range(size), size)
    waiting: list[int] = []
    for i in order:
        way = draw.choice(["hold", "add"] if known else ["hold", "fold", "add"])
        if way == "hold":
            ledger.hold(member(i), source(i), version=0)
            waiting.append(i)
        elif way == "fold":
            ledger.fold([member(i)], rewards[i], source(i), version=0)
        else:
            scaled = [advantages[i] * t for t in source(i)]
            ledger.add([member(i)], scaled[:2], {GROUP: scaled[2:]}, version=0)
    for i in draw.sample(waiting, len(waiting)):
        ledger.bind(member(i), rewards[i], coefficient=advantages[i] if known else None)
    adjoints = ledger.close(GROUP, coefficients(rewards, advantages))
    if coefficient is CoefficientClass.AFFINE_BATCH:
        ledger.close_batch(coefficients(rewards, advantages))
    total = ledger.settle(1.0)
    if not any(advantages):
        assert all(not t.any() for t in [*total, *adjoints])
        return
    columns = zip(*(source(i) for i in range(size)), strict=True)
    expected = [sum(a * t for a, t in zip(advantages, column, strict=True)) for column in columns]
    for got, wanted in zip([*total, *adjoints], expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_settle_scales_once() -> None:
    ledger = open_ledger()
    ledger.add([member(0)], source(0)[:2], {}, version=0)
    ledger.close(GROUP, coefficients([1.0], [1.0]))
    for got, wanted in zip(ledger.settle(0.25), source(0), strict=False):
        assert torch.equal(got, 0.25 * wanted)


def test_members_of_one_reward_fold_as_their_sum() -> None:
    apart, together = open_ledger(), open_ledger()
    for i, reward in enumerate([1.0, 1.0, 0.0]):
        apart.fold([member(i)], reward, source(i), version=0)
    joint = [a + b for a, b in zip(source(0), source(1), strict=True)]
    together.fold([member(0), member(1)], 1.0, joint, version=0)
    together.fold([member(2)], 0.0, source(2), version=0)
    weights = coefficients([1.0, 1.0, 0.0], [1.0, 1.0, -2.0])
    for ledger in (apart, together):
        ledger.close(GROUP, weights)
    for left, right in zip(apart.settle(1.0), together.settle(1.0), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)


def test_rewards_with_an_offset_keep_their_digits_in_float32() -> None:
    rewards = [10_000.0 + r for r in (0.1, 0.7, 0.35, 0.9)]
    mean = sum(rewards) / 4
    advantages = [r - mean for r in rewards]
    ledger = Ledger(parameters(torch.float32), CoefficientClass.AFFINE_GROUP)
    ledger.begin(0)
    ledger.open_group(GROUP, [member(i) for i in range(4)])
    for i, reward in enumerate(rewards):
        ledger.fold([member(i)], reward, source(i, torch.float32), version=0)
    ledger.close(GROUP, coefficients(rewards, advantages))
    exact = [sum(a * source(i)[k] for i, a in enumerate(advantages)) for k in range(2)]
    for got, wanted in zip(ledger.settle(1.0), exact, strict=True):
        assert float((got.double() - wanted).norm() / wanted.norm()) < 1e-6


def test_low_precision_sources_are_summed_in_float32() -> None:
    """256 + 1 isn't 257 in bfloat16."""
    ledger = Ledger([torch.zeros(1, dtype=torch.bfloat16)], CoefficientClass.AFFINE_GROUP)
    ledger.begin(0)
    ledger.open_group(GROUP, [member(i) for i in range(4)])
    for i, value in enumerate([256.0, 1.0, 1.0, 1.0]):
        ledger.fold([member(i)], float(i == 0), [torch.tensor([value], dtype=torch.bfloat16)], version=0)
    ledger.close(GROUP, coefficients([1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 2.0, 2.0]))
    (total,) = ledger.settle(1.0)
    assert total.dtype is torch.float32
    assert float(total) == 256.0 + 3 * 2.0


def test_a_source_that_was_handed_over_is_never_written_to() -> None:
    ledger = open_ledger()
    mine = [source(i) for i in range(3)]
    kept = [[t.clone() for t in s] for s in mine]
    ledger.hold(member(0), mine[0], version=0)
    ledger.fold([member(1)], 1.0, [t.clone() for t in mine[1]], version=0)
    ledger.bind(member(0), 0.0)
    ledger.add([member(2)], mine[2][:2], {}, version=0)
    ledger.close(GROUP, coefficients([0.0, 1.0, 0.5], [-1.0, 1.0, 0.0]))
    ledger.settle(2.0)
    for before, after in zip(kept[2], mine[2], strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("coefficient", "buffers"),
    [(CoefficientClass.KNOWN, 0), (CoefficientClass.AFFINE_GROUP, 1), (CoefficientClass.ARBITRARY, 1)],
)
def test_a_known_coefficient_needs_no_buffer_once_its_reward_is_in(coefficient: CoefficientClass, buffers: int) -> None:
    ledger = open_ledger(coefficient)
    assert ledger.num_buffered_groups == 0
    ledger.hold(member(0), source(0), version=0)
    assert ledger.num_buffered_groups == 1
    ledger.bind(member(0), 1.0, coefficient=0.5 if coefficient is CoefficientClass.KNOWN else None)
    assert ledger.num_buffered_groups == buffers


def test_equal_rewards_leave_no_signal() -> None:
    ledger = open_ledger()
    for i in range(3):
        ledger.fold([member(i)], 1.0, source(i), version=0)
    assert ledger.close(GROUP, coefficients([1.0] * 3, [0.0] * 3)) == []
    assert ledger.settle(1.0) == []


def test_settled_sums_start_anew() -> None:
    ledger = open_ledger()
    ledger.add([member(0)], source(0)[:2], {}, version=0)
    ledger.close(GROUP, coefficients([1.0], [1.0]))
    first = ledger.settle(1.0)
    ledger.begin(1)
    ledger.open_group(GROUP, [member(0)])
    ledger.add([member(0)], source(1)[:2], {}, version=1)
    ledger.close(GROUP, coefficients([1.0], [1.0]))
    for got, once, other in zip(ledger.settle(1.0), first, source(1), strict=False):
        assert torch.equal(got, other)
        assert not torch.equal(got, once)


def test_a_lost_member_takes_its_held_source_along() -> None:
    ledger = open_ledger()
    for i in range(3):
        ledger.hold(member(i), source(i), version=0)
    ledger.discard(member(1))
    for i, reward in ((0, 1.0), (2, 0.0)):
        ledger.bind(member(i), reward)
    survivors = Coefficients(rewards={member(0): 1.0, member(2): 0.0}, advantages={member(0): 0.5, member(2): -0.5})
    ledger.close(GROUP, survivors)
    for got, a, b in zip(ledger.settle(1.0), source(0), source(2), strict=False):
        torch.testing.assert_close(got, 0.5 * a - 0.5 * b)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_group_closes_once() -> None:
    ledger = open_ledger()
    ledger.close(GROUP, coefficients([1.0, 0.0, 0.5], [0.0] * 3))
    with pytest.raises(PhaseError, match="closes once"):
        ledger.close(GROUP, coefficients([1.0, 0.0, 0.5], [0.0] * 3))
    with pytest.raises(PhaseError, match="closed"):
        ledger.hold(member(0), source(0), version=0)


def test_a_group_opens_once() -> None:
    ledger = open_ledger()
    with pytest.raises(ContractError, match="opened before"):
        ledger.open_group(GROUP, [member(0)])
    ledger.close(GROUP, coefficients([1.0, 0.0, 0.5], [0.0] * 3))
    with pytest.raises(ContractError, match="opened before"):
        ledger.open_group(GROUP, [member(0)])


@pytest.mark.parametrize("stranger", [member(7), member(0, group=4)])
def test_strangers_are_refused(stranger: TrajectoryId) -> None:
    ledger = open_ledger()
    with pytest.raises(ContractError):
        ledger.hold(stranger, source(0), version=0)
    with pytest.raises(ContractError):
        ledger.fold([stranger], 1.0, source(0), version=0)
    with pytest.raises(ContractError):
        ledger.add([member(0), stranger], source(0)[:2], {}, version=0)


@pytest.mark.parametrize("first", ["hold", "fold", "add"])
@pytest.mark.parametrize("second", ["hold", "fold", "add"])
def test_a_trajectory_counts_once(first: str, second: str) -> None:
    ledger = open_ledger()

    def enter(way: str) -> None:
        if way == "hold":
            ledger.hold(member(0), source(0), version=0)
        elif way == "fold":
            ledger.fold([member(0)], 1.0, source(0), version=0)
        else:
            ledger.add([member(0)], source(0)[:2], {}, version=0)

    enter(first)
    with pytest.raises(ContractError, match="twice"):
        enter(second)


def test_a_source_is_bound_once_and_only_after_it_is_held() -> None:
    ledger = open_ledger()
    with pytest.raises(ContractError, match="held"):
        ledger.bind(member(0), 1.0)
    ledger.hold(member(0), source(0), version=0)
    ledger.bind(member(0), 1.0)
    with pytest.raises(ContractError, match="held"):
        ledger.bind(member(0), 1.0)


def test_another_version_is_stale() -> None:
    ledger = open_ledger(version=3)
    for version in (2, 4):
        with pytest.raises(StaleWorkError, match="version 3"):
            ledger.hold(member(0), source(0), version=version)
        with pytest.raises(StaleWorkError):
            ledger.fold([member(0)], 1.0, source(0), version=version)
        with pytest.raises(StaleWorkError):
            ledger.add([member(0)], source(0)[:2], {}, version=version)


def test_a_folded_member_is_not_lost_any_more() -> None:
    ledger = open_ledger()
    ledger.fold([member(0)], 1.0, source(0), version=0)
    with pytest.raises(ContractError, match="folded"):
        ledger.discard(member(0))


def test_phases_come_in_order() -> None:
    ledger = Ledger(parameters(), CoefficientClass.AFFINE_GROUP)
    with pytest.raises(PhaseError, match="began"):
        ledger.settle(1.0)
    ledger.begin(0)
    with pytest.raises(PhaseError, match="settle"):
        ledger.begin(1)
    ledger.open_group(GROUP, [member(0), member(1)])
    with pytest.raises(PhaseError, match="open"):
        ledger.settle(1.0)
    ledger.hold(member(0), source(0), version=0)
    with pytest.raises(PhaseError, match="bound"):
        ledger.close(GROUP, coefficients([1.0, 0.0], [0.5, -0.5]))


@pytest.mark.parametrize(
    ("coefficient", "rewards", "advantages"),
    [
        (CoefficientClass.AFFINE_GROUP, [0.0, 1.0, 2.0], [0.0, 1.0, 4.0]),
        (CoefficientClass.AFFINE_BATCH, [0.0, 1.0, 2.0], [0.0, 1.0, 4.0]),
        (CoefficientClass.BY_VALUE, [1.0, 1.0, 0.0], [0.5, 0.6, -1.0]),
    ],
)
def test_a_wrong_declaration_raises_at_close(
    coefficient: CoefficientClass, rewards: list[float], advantages: list[float]
) -> None:
    ledger = open_ledger(coefficient)
    with pytest.raises(CoefficientClassError, match="declare"):
        ledger.close(GROUP, coefficients(rewards, advantages))
