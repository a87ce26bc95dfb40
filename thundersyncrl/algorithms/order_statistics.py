"""Advantages that reward the best of k trajectories instead of their average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from thundersyncrl.errors import ContractError


def pass_at_k(rewards_G: Sequence[float], *, k: int) -> list[float]:
    """Return the advantages of pass@k training, averaged over all k-subsets of the group.

    With F = C(N-, k) / C(G, k) the chance that a random k-subset fails and s = sqrt(F (1 - F)) the deviation
    of its reward (the largest of its rewards): A = F / s for a success, A = (F - C(N- - 1, k - 1) / C(G - 1,
    k - 1)) / s for a failure. All 0.0 when every k-subset passes, or none.

    Args:
        rewards_G: [G] rewards, each exactly 0 or 1; N- of them are 0.
        k: Size of the subset, 1 to G.

    Returns:
        [G] advantages without unit.

    Raises:
        ContractError: a reward other than 0 and 1, or fewer than k rewards.

    Source:
        Chen et al. 2025, Pass@k Training, arXiv 2508.10751, analytical derivation.

    Example:
        >>> [round(a, 3) for a in pass_at_k([1.0, 0.0, 0.0, 0.0], k=2)]
        [1.0, -0.333, -0.333, -0.333]
        >>> pass_at_k([1.0, 1.0, 1.0, 0.0], k=2)
        [0.0, 0.0, 0.0, 0.0]
    """
    _require_group(rewards_G, k)
    odd = [reward for reward in rewards_G if reward not in (0.0, 1.0)]
    if odd:
        raise ContractError(
            f"expected rewards of exactly 0 or 1 for pass@k, got {odd[0]}; use the estimator "
            "`pass_at_k_continuous`, or make the verifier's reward binary"
        )
    size = len(rewards_G)
    failures = sum(reward == 0.0 for reward in rewards_G)
    failing = Fraction(math.comb(failures, k), math.comb(size, k))
    if failing in (0, 1):
        return [0.0] * size
    failing_with_failure = Fraction(math.comb(failures - 1, k - 1), math.comb(size - 1, k - 1))
    spread = math.sqrt(failing * (1 - failing))
    of_success, of_failure = float(failing) / spread, float(failing - failing_with_failure) / spread
    return [of_success if reward == 1.0 else of_failure for reward in rewards_G]


def max_at_k(rewards_G: Sequence[float], *, k: int) -> list[float]:
    """Return A_i = k * mean over (k-1)-subsets J of the siblings of max(0, r_i - max_J r).

    What trajectory i adds to the best of k. The mean over trajectories of A_i * score gradient is an unbiased
    estimate of the gradient of the expected best reward of k trajectories.

    Args:
        rewards_G: [G] rewards, any finite numbers.
        k: Size of the subset, 2 to G.

    Returns:
        [G] advantages in the unit of the reward, none below 0.

    Raises:
        ContractError: k below 2, or fewer than k rewards.

    Source:
        Walder and Karkhanis 2025, Pass@K Policy Optimization, arXiv 2505.15201, the estimator s^(loo-1),
        times G.

    Example:
        >>> max_at_k([3.0, 1.0, 0.0], k=2)
        [5.0, 1.0, 0.0]
    """
    _require_group(rewards_G, k)
    if k < 2:
        raise ContractError(f"expected k of at least 2, got {k}; for k = 1 use the estimator `rloo`")
    size = len(rewards_G)
    order = sorted(range(size), key=lambda index: rewards_G[index])
    # C(j, k - 2) of the (k-1)-subsets have the j-th smallest reward as their largest.
    weights = [k * math.comb(rank, k - 2) / math.comb(size - 1, k - 1) for rank in range(size)]
    advantages = [0.0] * size
    for rank, index in enumerate(order):
        gains = (weights[j] * (rewards_G[index] - rewards_G[order[j]]) for j in range(rank))
        advantages[index] = math.fsum(gains)
    return advantages


def _require_group(rewards_G: Sequence[float], k: int) -> None:
    if not 1 <= k <= len(rewards_G):
        raise ContractError(
            f"expected k between 1 and the group's size, got k = {k} for {len(rewards_G)} rewards; "
            "raise `rollout.group_size` or register the estimator with a smaller k"
        )
