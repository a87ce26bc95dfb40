"""Advantages that compare all trajectories of a step, whichever group they are in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thundersyncrl.algorithms.estimator import GroupRewards
from thundersyncrl.algorithms.group_relative import centered, deviation

SMALLEST_DEVIATION = 1e-4
"""Floor of the step's deviation; OpenRLHF clamps the variance at 1e-8."""


def whitened(groups: Sequence[GroupRewards], baseline: float = 0.0) -> list[list[float]]:
    """Return REINFORCE++'s advantages: A_i = (r_i - mean) / max(std, 1e-4), over all trajectories of the
    step.

    Each trajectory counts once. OpenRLHF whitens over tokens instead, which weighs a trajectory by its
    length. A group with equal rewards isn't zero here unless the whole step is equal.

    Args:
        groups: Rewards of every group of the step.
        baseline: Without effect; part of the signature of all estimators.

    Returns:
        Advantages in the nesting of `groups`, without unit; exactly 0.0 when all rewards of the step are
        equal.

    Source:
        Hu et al. 2025, REINFORCE++, arXiv 2501.03262.

    Example:
        >>> group = lambda *rewards: GroupRewards(rewards_G=rewards, lengths_G=(1,) * len(rewards))
        >>> whitened([group(1.0, 1.0), group(0.0, 0.0)])
        [[1.0, 1.0], [-1.0, -1.0]]
    """
    del baseline
    rewards = [reward for group in groups for reward in group.rewards_G]
    scale = max(deviation(rewards), SMALLEST_DEVIATION)
    advantages = iter(centered(rewards))
    return [[next(advantages) / scale for _ in group.rewards_G] for group in groups]


def inverse_deviation(advantages: Sequence[Sequence[float]]) -> float:
    """Return 1 / max(s, 1e-4), s the root mean square of all advantages of the step.

    The late scalar of REINFORCE++ with group baseline: its advantages r_i - mean_g have mean 0 over the step,
    so their root mean square is their population deviation.

    Args:
        advantages: All advantages of the step, by group.

    Source:
        Hu et al. 2025, REINFORCE++, arXiv 2501.03262 (REINFORCE++ with baseline).

    Example:
        >>> inverse_deviation([[0.5, -0.5], [0.5, -0.5]])
        2.0
    """
    flat = [advantage for group in advantages for advantage in group]
    if not flat:
        return 1.0
    return 1.0 / max(math.hypot(*flat) / math.sqrt(len(flat)), SMALLEST_DEVIATION)
