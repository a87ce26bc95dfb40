"""The registered estimators keep the promises that they declare."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.algorithms import advantages as published
from thundersyncrl.algorithms.coefficient_check import check_class, check_known
from thundersyncrl.algorithms.estimator import (
    CoefficientClass,
    Estimator,
    GroupRewards,
    RewardDomain,
    estimator_names,
    get_estimator,
    register,
)
from thundersyncrl.errors import CoefficientClassError, ConfigError

EXPECTED = {
    "cispo": ("affine_group", "token"),
    "constant_baseline": ("known", "constant"),
    "dapo": ("affine_group", "token"),
    "dr_grpo": ("affine_group", "constant"),
    "grpo": ("affine_group", "trajectory"),
    "grpo_clipped": ("by_value", "trajectory"),
    "grpo_sample_std": ("affine_group", "trajectory"),
    "gspo": ("affine_group", "trajectory"),
    "leave_one_out_std": ("by_value", "token"),
    "maxrl": ("affine_group", "constant"),
    "opo": ("affine_group", "constant"),
    "pass_at_k": ("by_value", "token"),
    "pass_at_k_continuous": ("arbitrary", "constant"),
    "raft": ("known", "trajectory"),
    "reinforce_pp": ("affine_batch", "token"),
    "reinforce_pp_baseline": ("affine_group", "token"),
    "rloo": ("affine_group", "constant"),
    "running_mean": ("known", "constant"),
}
GROUP_CLASSES = (CoefficientClass.AFFINE_GROUP, CoefficientClass.BY_VALUE, CoefficientClass.ARBITRARY)


def rewards_for(estimator: Estimator, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw rewards from the estimator's domain: binary, non-negative, or around an offset."""
    if estimator.reward_domain is RewardDomain.BINARY:
        return rng.integers(0, 2, shape).astype(float)
    if estimator.reward_domain is RewardDomain.NON_NEGATIVE:
        return rng.integers(0, 5, shape) / 4
    return rng.integers(-4, 5, shape) / 4


def make_groups(rewards: np.ndarray, lengths: np.ndarray) -> list[GroupRewards]:
    return [
        GroupRewards(rewards_G=tuple(map(float, r)), lengths_G=tuple(map(int, n)))
        for r, n in zip(rewards, lengths, strict=True)
    ]


def check_promise(estimator: Estimator, groups: list[GroupRewards], baseline: float = 0.0) -> None:
    """Raise when the estimator's advantages on these groups break its declared class."""
    together = estimator.advantages(groups, baseline)
    if estimator.coefficient is CoefficientClass.AFFINE_BATCH:
        rewards = [r for g in groups for r in g.rewards_G]
        check_class(estimator.coefficient, rewards, [a for g in together for a in g], where="step=0")
        return
    for number, (group, advantages) in enumerate(zip(groups, together, strict=True)):
        check_class(estimator.coefficient, group.rewards_G, advantages, where=f"step=0/group={number}")
        if estimator.coefficient is CoefficientClass.KNOWN:
            alone = [
                estimator.advantages([GroupRewards(rewards_G=(r,), lengths_G=(n,))], baseline)[0][0]
                for r, n in zip(group.rewards_G, group.lengths_G, strict=True)
            ]
            check_known(alone, advantages, where=f"step=0/group={number}")


def test_every_estimator_of_the_design_is_registered_with_its_class_and_normalizer() -> None:
    for name, (coefficient, normalizer) in EXPECTED.items():
        estimator = get_estimator(name)
        assert (estimator.coefficient.value, estimator.normalizer) == (coefficient, normalizer), name
    assert set(EXPECTED) <= set(estimator_names())


@pytest.mark.parametrize("name", EXPECTED)
@given(seed=st.integers(0, 10**6))
def test_the_declared_class_holds_on_random_rewards(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    estimator = get_estimator(name)
    shape = (3, int(rng.integers(max(estimator.min_group_size, 2), 9)))
    check_promise(estimator, make_groups(rewards_for(estimator, rng, shape), rng.integers(0, 40, shape)), 0.3)


@pytest.mark.parametrize("name", [n for n in EXPECTED if get_estimator(n).reward_domain is not RewardDomain.BINARY])
def test_the_declared_class_holds_at_a_large_offset(name: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        check_promise(get_estimator(name), make_groups(10000 + rng.random((4, 8)), rng.integers(1, 40, (4, 8))), 9999.5)


@pytest.mark.parametrize("name", [n for n in EXPECTED if get_estimator(n).coefficient in GROUP_CLASSES])
def test_a_group_class_never_looks_at_another_group(name: str) -> None:
    rng = np.random.default_rng(4)
    estimator = get_estimator(name)
    groups = make_groups(rewards_for(estimator, rng, (4, 6)), rng.integers(1, 40, (4, 6)))
    together = estimator.advantages(groups, 0.0)
    assert together == [estimator.advantages([g], 0.0)[0] for g in groups]


@pytest.mark.parametrize("name", [n for n in EXPECTED if get_estimator(n).coefficient in GROUP_CLASSES])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_uniform_groups_get_exactly_zero(name: str, reward: float) -> None:
    """Case H-08."""
    group = GroupRewards(rewards_G=(reward,) * 4, lengths_G=(1, 2, 3, 4))
    assert get_estimator(name).advantages([group], 0.0) == [[0.0] * 4]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_lone_survivor_or_an_empty_trajectory_never_gives_nan(name: str) -> None:
    """Cases H-08 and H-13."""
    estimator = get_estimator(name)
    for size in {estimator.min_group_size, 4}:
        group = GroupRewards(rewards_G=(0.0, 0.0, 1.0, 1.0)[:size], lengths_G=(1, 0, 2, 3)[:size])
        assert all(math.isfinite(a) for a in estimator.advantages([group], 0.0)[0])
    if estimator.min_group_size == 2:
        alone = GroupRewards(rewards_G=(0.7,), lengths_G=(1,))
        assert estimator.advantages([alone], 0.0) == [[0.0]]


@pytest.mark.parametrize(
    ("truth", "claim"),
    [
        ("leave_one_out_std", CoefficientClass.AFFINE_GROUP),
        ("grpo_clipped", CoefficientClass.AFFINE_GROUP),
        ("pass_at_k_continuous", CoefficientClass.AFFINE_GROUP),
        ("raft", CoefficientClass.AFFINE_GROUP),
        ("grpo", CoefficientClass.AFFINE_BATCH),
        ("grpo", CoefficientClass.KNOWN),
        ("reinforce_pp", CoefficientClass.KNOWN),
    ],
)
def test_an_estimator_that_lies_about_its_class_is_caught(truth: str, claim: CoefficientClass) -> None:
    honest = get_estimator(truth)
    liar = Estimator(name=f"{truth} as {claim.value}", coefficient=claim, advantages=honest.advantages)
    rewards = np.array([[1.0, 0.5, 0.25, 0.0, 0.0, -0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0]])
    groups = make_groups(rewards, np.ones_like(rewards))
    check_promise(honest, groups)
    with pytest.raises(CoefficientClassError):
        check_promise(liar, groups)


def test_a_tie_broken_by_length_is_arbitrary_and_not_by_value() -> None:
    def shorter_first(group: GroupRewards) -> list[float]:
        order = sorted(range(4), key=lambda i: (-group.rewards_G[i], group.lengths_G[i]))
        return [1.5 - order.index(i) for i in range(4)]

    group = GroupRewards(rewards_G=(1.0, 0.0, 1.0, 0.0), lengths_G=(9, 4, 3, 8))
    ranked = published.per_group(shorter_first)
    assert ranked([group], 0.0) == [[0.5, -0.5, 1.5, -1.5]]
    check_promise(Estimator(name="rank", coefficient=CoefficientClass.ARBITRARY, advantages=ranked), [group])
    with pytest.raises(CoefficientClassError, match="by_value"):
        check_promise(Estimator(name="rank", coefficient=CoefficientClass.BY_VALUE, advantages=ranked), [group])


def test_baselines_reach_the_estimators_that_ask_for_one() -> None:
    group = GroupRewards(rewards_G=(1.0, 0.0), lengths_G=(1, 1))
    assert get_estimator("running_mean").advantages([group], 0.75) == [[0.25, -0.75]]
    assert [n for n in EXPECTED if get_estimator(n).needs_baseline] == ["running_mean"]
    assert get_estimator("constant_baseline").advantages([group], 0.75) == [[0.5, -0.5]]


def test_only_dapo_drops_uniform_groups() -> None:
    assert [n for n in EXPECTED if get_estimator(n).drops_uniform_groups] == ["dapo"]


def test_batch_scale_whitens_reinforce_pp_with_group_baseline() -> None:
    estimator = get_estimator("reinforce_pp_baseline")
    rewards = np.random.default_rng(5).random((3, 4))
    advantages = estimator.advantages(make_groups(rewards, np.ones((3, 4))), 0.0)
    assert estimator.batch_scale is not None
    scaled = np.asarray(advantages) * estimator.batch_scale(advantages)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(scaled, centred / centred.std(), rtol=1e-12)
    assert [n for n in EXPECTED if get_estimator(n).batch_scale is not None] == ["reinforce_pp_baseline"]


def test_factories_take_their_parameters() -> None:
    group = GroupRewards(rewards_G=(1.0, 0.0, 0.0, 0.0), lengths_G=(1, 1, 1, 1))
    assert published.make_clipped_grpo(1.0, name="c").advantages([group], 0.0)[0][0] == 1.0
    assert published.make_pass_at_k(3, name="p").min_group_size == 3
    assert published.make_pass_at_k(1, name="p").min_group_size == 2
    assert published.make_max_at_k(2, name="m").advantages([group], 0.0) == [[2.0, 0.0, 0.0, 0.0]]
    assert published.make_constant_baseline(0.25, name="b").advantages([group], 0.0)[0][:2] == [0.75, -0.25]
    fine = published.make_grpo(epsilon=1e-12, sample=True, name="g").advantages([group], 0.0)[0]
    assert fine == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_impossible_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="bound above 0"):
        published.make_clipped_grpo(0.0)
    with pytest.raises(ConfigError, match="k of at least 1"):
        published.make_pass_at_k(0)
    with pytest.raises(ConfigError, match="k of at least 2"):
        published.make_max_at_k(1)
    with pytest.raises(ConfigError, match="epsilon above 0"):
        published.make_grpo(epsilon=0.0)


def test_a_user_registers_an_estimator_in_a_few_lines() -> None:
    mine = register(
        Estimator(
            name="test_only_signs",
            coefficient=CoefficientClass.BY_VALUE,
            advantages=published.per_group(lambda g: [math.copysign(1.0, r - 0.5) for r in g.rewards_G]),
        )
    )
    assert get_estimator("test_only_signs") is mine
    assert register(mine) is mine
    with pytest.raises(ConfigError, match="'grpo', which is registered"):
        register(Estimator(name="grpo", coefficient=mine.coefficient, advantages=mine.advantages))


def test_a_misspelt_name_gets_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"'gropo'; did you mean 'grpo'\?"):
        get_estimator("gropo")


def test_the_algorithms_need_neither_torch_nor_transformers() -> None:
    modules = "advantages coefficient_check shaping weights"
    imports = "; ".join(f"import thundersyncrl.algorithms.{module}" for module in modules.split())
    code = f"import sys; {imports}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
