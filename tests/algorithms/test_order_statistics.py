"""Best-of-k advantages against brute force over all subsets."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.algorithms.order_statistics import max_at_k, pass_at_k
from thundersyncrl.errors import ContractError


def pass_at_k_over_subsets(rewards: list[float], k: int) -> list[float]:
    """Whiten the best reward of every k-subset, then average over the subsets of each trajectory."""
    subsets = list(combinations(range(len(rewards)), k))
    best = np.array([max(rewards[i] for i in subset) for subset in subsets])
    if best.std() == 0:
        return [0.0] * len(rewards)
    advantages = (best - best.mean()) / best.std()
    return [
        float(np.mean([a for a, subset in zip(advantages, subsets, strict=True) if i in subset]))
        for i in range(len(rewards))
    ]


def max_at_k_over_subsets(rewards: list[float], k: int) -> list[float]:
    """Sum what each trajectory adds to the best of each k-subset that it is in, times G per subset."""
    size = len(rewards)
    subsets = list(combinations(range(size), k))
    gains = [0.0] * size
    for subset in subsets:
        for i in subset:
            best_without = max(rewards[j] for j in subset if j != i)
            gains[i] += max(rewards[j] for j in subset) - best_without
    return [size * gain / len(subsets) for gain in gains]


@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=9), data=st.data())
def test_pass_at_k_equals_brute_force(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    np.testing.assert_allclose(pass_at_k(rewards, k=k), pass_at_k_over_subsets(rewards, k), rtol=0, atol=1e-12)


@given(rewards=st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=8), data=st.data())
def test_max_at_k_equals_brute_force_with_ties(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(2, len(rewards)))
    np.testing.assert_allclose(max_at_k(rewards, k=k), max_at_k_over_subsets(rewards, k), rtol=0, atol=1e-12)


def test_pass_at_one_is_grpo_without_epsilon() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(pass_at_k(rewards.tolist(), k=1), (rewards - rewards.mean()) / rewards.std())


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_uniform_groups_get_exactly_zero(reward: float) -> None:
    """Case H-08."""
    assert pass_at_k([reward] * 4, k=2) == [0.0] * 4
    assert max_at_k([reward] * 4, k=2) == [0.0] * 4


def test_max_at_k_is_accurate_at_a_large_offset() -> None:
    rewards = [float(n) / 1024 for n in np.random.default_rng(2).integers(0, 1024, 8)]
    assert max_at_k([10000.0 + r for r in rewards], k=3) == pytest.approx(max_at_k(rewards, k=3), abs=1e-14)


def test_large_groups_keep_exact_binomials() -> None:
    advantages = pass_at_k([1.0] + [0.0] * 511, k=64)
    failing = 448 / 512  # C(511, 64) / C(512, 64)
    failing_with_failure = 448 / 511  # C(510, 63) / C(511, 63)
    spread = (failing * (1 - failing)) ** 0.5
    assert advantages[0] == pytest.approx(failing / spread, rel=1e-12)
    assert advantages[1] == pytest.approx((failing - failing_with_failure) / spread, rel=1e-12)


def test_rewards_that_are_not_binary_are_refused() -> None:
    with pytest.raises(ContractError, match=r"exactly 0 or 1 for pass@k, got 0\.5.*pass_at_k_continuous"):
        pass_at_k([1.0, 0.5, 0.0], k=2)


@pytest.mark.parametrize("advantages", [pass_at_k, max_at_k])
def test_groups_smaller_than_k_are_refused(advantages: object) -> None:
    assert callable(advantages)
    with pytest.raises(ContractError, match="k = 4 for 3 rewards"):
        advantages([1.0, 0.0, 0.0], k=4)


def test_best_of_one_has_nothing_to_add_to() -> None:
    with pytest.raises(ContractError, match="k of at least 2, got 1"):
        max_at_k([1.0, 0.0], k=1)
