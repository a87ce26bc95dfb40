"""Advantages over the whole step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.algorithms.batch_relative import inverse_deviation, whitened
from thundersyncrl.algorithms.estimator import GroupRewards

steps = st.lists(st.lists(st.integers(0, 64).map(lambda n: n / 64), min_size=1, max_size=6), min_size=1, max_size=5)


def make_groups(rewards: list[list[float]]) -> list[GroupRewards]:
    return [GroupRewards(rewards_G=tuple(g), lengths_G=(1,) * len(g)) for g in rewards]


@given(rewards=steps)
def test_whitening_equals_numpys_over_all_trajectories(rewards: list[list[float]]) -> None:
    flat = np.concatenate([np.asarray(g) for g in rewards])
    expected = (flat - flat.mean()) / max(flat.std(), 1e-4)
    advantages = whitened(make_groups(rewards))
    assert [len(a) for a in advantages] == [len(r) for r in rewards]
    np.testing.assert_allclose(np.concatenate(advantages), expected, rtol=0, atol=1e-11)


def test_whitening_gives_mean_zero_and_deviation_one_at_a_large_offset() -> None:
    rewards = (10000.0 + np.random.default_rng(1).random((4, 8))).tolist()
    flat = np.concatenate(whitened(make_groups(rewards)))
    assert flat.mean() == pytest.approx(0.0, abs=1e-14)
    assert flat.std() == pytest.approx(1.0, abs=1e-14)


def test_a_uniform_step_gets_exactly_zero() -> None:
    """Case H-08."""
    assert whitened(make_groups([[0.7, 0.7], [0.7]])) == [[0.0, 0.0], [0.0]]
    assert whitened(make_groups([[0.7]])) == [[0.0]]
    assert whitened([]) == []


def test_a_uniform_group_in_a_mixed_step_still_carries_signal() -> None:
    assert whitened(make_groups([[1.0, 1.0], [0.0, 0.0]])) == [[1.0, 1.0], [-1.0, -1.0]]


@given(rewards=steps)
def test_inverse_deviation_is_that_of_the_centred_rewards(rewards: list[list[float]]) -> None:
    centred = [np.asarray(g) - np.mean(g) for g in rewards]
    expected = 1.0 / max(float(np.std(np.concatenate(centred))), 1e-4)
    assert inverse_deviation([c.tolist() for c in centred]) == pytest.approx(expected, rel=1e-9)


def test_inverse_deviation_of_a_step_without_signal_is_finite() -> None:
    """Case H-08."""
    assert inverse_deviation([[0.0, 0.0]]) == 1e4
    assert inverse_deviation([]) == 1.0
