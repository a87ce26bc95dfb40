"""Advantages that need nothing but the trajectory's own reward."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.algorithms.own_reward import RunningMean, above, positive_only

rewards_lists = st.lists(st.floats(-1e4, 1e4), max_size=20)


@given(rewards=rewards_lists)
def test_positive_samples_are_weighed_by_their_reward_and_others_not_at_all(rewards: list[float]) -> None:
    np.testing.assert_array_equal(positive_only(rewards), np.clip(rewards, 0, None))


@given(rewards=rewards_lists, baseline=st.floats(-1e4, 1e4))
def test_baseline_is_taken_off(rewards: list[float], baseline: float) -> None:
    np.testing.assert_array_equal(above(rewards, baseline=baseline), np.asarray(rewards) - baseline)


@given(steps=st.lists(rewards_lists, max_size=6))
def test_running_mean_equals_the_mean_of_everything_seen(steps: list[list[float]]) -> None:
    mean = RunningMean()
    for rewards in steps:
        mean = mean.extended(rewards)
    everything = [r for rewards in steps for r in rewards]
    assert mean.num_rewards == len(everything)
    assert mean.mean == pytest.approx(np.mean(everything) if everything else 0.0, rel=1e-9, abs=1e-9)
