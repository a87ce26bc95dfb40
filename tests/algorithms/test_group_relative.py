"""Group-relative advantages against numpy in float64, and what must hold for any rewards."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, getcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from thundersyncrl.algorithms.group_relative import (
    centered,
    clipped,
    deviation,
    leave_one_out,
    leave_one_out_normalized,
    length_weighted,
    mean_normalized,
    normalized,
)
from thundersyncrl.errors import ContractError

Advantages = Callable[[list[float]], list[float]]

SHIFT_INVARIANT: dict[str, Advantages] = {
    "centered": centered,
    "normalized": normalized,
    "normalized by sample deviation": lambda rewards: normalized(rewards, sample=True),
    "leave_one_out": leave_one_out,
    "leave_one_out_normalized": leave_one_out_normalized,
}
ALL: dict[str, Advantages] = {**SHIFT_INVARIANT, "mean_normalized": mean_normalized}

rewards_lists = st.lists(st.integers(0, 64).map(lambda n: n / 64), min_size=2, max_size=12)


def brute_force(name: str, rewards: list[float]) -> Any:
    """Return the textbook advantages by numpy, each sibling set written out."""
    r = np.asarray(rewards)
    others = [np.delete(r, i) for i in range(len(r))]
    if name == "centered":
        return r - r.mean()
    if name == "normalized":
        return (r - r.mean()) / (r.std() + 1e-4)
    if name == "normalized by sample deviation":
        return (r - r.mean()) / (r.std(ddof=1) + 1e-4)
    if name == "leave_one_out":
        return np.array([x - o.mean() for x, o in zip(r, others, strict=True)])
    if name == "leave_one_out_normalized":
        stds = [o.std(ddof=1) if len(o) > 1 and np.ptp(o) > 0 else 0.0 for o in others]
        return np.array(
            [(x - o.mean()) / (s + 1e-6) if s > 0 else x - o.mean() for x, o, s in zip(r, others, stds, strict=True)]
        )
    return (r - r.mean()) / r.mean() if r.mean() > 0 else np.zeros_like(r)


@pytest.mark.parametrize("name", ALL)
@given(rewards=rewards_lists)
def test_values_equal_the_textbook_formula(name: str, rewards: list[float]) -> None:
    np.testing.assert_allclose(ALL[name](rewards), brute_force(name, rewards), rtol=1e-11, atol=1e-12)


def test_known_values() -> None:
    assert leave_one_out([1.0, 0.0, 1.0]) == pytest.approx([0.5, -1.0, 0.5])
    assert mean_normalized([1.0, 1.0, 0.0, 0.0]) == [1.0, 1.0, -1.0, -1.0]
    assert normalized([1.0, 0.0, 1.0], sample=True, epsilon=1e-12) == pytest.approx(
        [0.57735, -1.1547, 0.57735], abs=1e-5
    )
    assert length_weighted([1.0, 0.0, 0.5], [10, 30, 60]) == pytest.approx([0.6, -0.4, 0.1])
    assert clipped([3.0, -3.0, 0.25], bound=1.5) == [1.5, -1.5, 0.25]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 10000.7])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_uniform_groups_and_groups_of_one_get_exactly_zero(name: str, reward: float, size: int) -> None:
    """Case H-08."""
    assert ALL[name]([reward] * size) == [0.0] * size
    assert length_weighted([reward] * size, list(range(1, size + 1))) == [0.0] * size


@pytest.mark.parametrize("name", ALL)
def test_an_empty_group_gets_no_advantages(name: str) -> None:
    assert ALL[name]([]) == []
    assert length_weighted([], []) == []


@pytest.mark.parametrize("name", ALL)
@given(rewards=rewards_lists, seed=st.integers(0, 1000))
def test_permuting_the_group_permutes_the_advantages(name: str, rewards: list[float], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(rewards))
    shuffled = ALL[name]([rewards[i] for i in order])
    np.testing.assert_allclose(shuffled, np.asarray(ALL[name](rewards))[order], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", SHIFT_INVARIANT)
@given(rewards=rewards_lists, offset=st.integers(-10000, 10000))
def test_shifting_all_rewards_changes_nothing(name: str, rewards: list[float], offset: int) -> None:
    # Multiples of 1/64 stay exact under the shift, so any difference is the formula's own.
    assert ALL[name]([r + offset for r in rewards]) == pytest.approx(ALL[name](rewards), rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("name", ["centered", "leave_one_out", "normalized"])
@given(rewards=rewards_lists)
def test_advantages_sum_to_zero(name: str, rewards: list[float]) -> None:
    assert math.fsum(ALL[name](rewards)) == pytest.approx(0.0, abs=1e-11)


def test_large_offsets_keep_the_accuracy_of_the_differences() -> None:
    getcontext().prec = 60
    rewards = [10000.0 + float(u) for u in np.random.default_rng(0).random(16)]
    exact = [Decimal(r) for r in rewards]
    mean = sum(exact, Decimal(0)) / len(exact)
    std = (sum(((r - mean) ** 2 for r in exact), Decimal(0)) / len(exact)).sqrt()
    expected = [float((r - mean) / (std + Decimal("1e-4"))) for r in exact]
    np.testing.assert_allclose(normalized(rewards), expected, rtol=0, atol=1e-14)


@given(rewards=rewards_lists, data=st.data())
def test_length_weighted_baseline_is_the_length_weighted_mean(rewards: list[float], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=len(rewards), max_size=len(rewards)))
    assume(sum(lengths) > 0)
    expected = np.asarray(rewards) - np.average(rewards, weights=lengths)
    np.testing.assert_allclose(length_weighted(rewards, lengths), expected, rtol=0, atol=1e-13)


def test_the_reward_of_an_empty_trajectory_counts_in_the_baseline() -> None:
    """Case H-13: lengths 1, 0, 2, 3 and rewards 0, 0, 1, 1; the baseline is 1/2 and not 2/3."""
    assert centered([0.0, 0.0, 1.0, 1.0]) == [-0.5, -0.5, 0.5, 0.5]
    # Except where the baseline is weighted by length.
    assert length_weighted([0.0, 0.0, 1.0, 1.0], [1, 0, 2, 3]) == pytest.approx([-5 / 6, -5 / 6, 1 / 6, 1 / 6])


def test_length_weighting_of_a_group_without_tokens_falls_on_the_mean() -> None:
    assert length_weighted([1.0, 0.0], [0, 0]) == [0.5, -0.5]


def test_length_weighting_refuses_a_wrong_number_of_lengths() -> None:
    with pytest.raises(ContractError, match="1 lengths for 2 rewards"):
        length_weighted([1.0, 0.0], [3])


def test_dividing_by_the_mean_refuses_negative_rewards() -> None:
    with pytest.raises(ContractError, match=r"at least 0, got -0\.5"):
        mean_normalized([1.0, -0.5])


@given(rewards=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=10), sample=st.booleans())
def test_deviation_equals_numpys(rewards: list[float], sample: bool) -> None:
    expected = np.std(rewards, ddof=int(sample)) if len(rewards) > sample else 0.0
    assert deviation(rewards, sample=sample) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_deviation_neither_overflows_nor_underflows() -> None:
    assert deviation([1e200, -1e200]) == pytest.approx(1e200)
    assert deviation([1e-200, -1e-200]) == pytest.approx(1e-200)
