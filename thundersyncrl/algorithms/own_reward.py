"""Advantages that are known once the trajectory's own reward is: nothing waits for its group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def positive_only(rewards: Sequence[float]) -> list[float]:
    """Return RAFT's coefficients: A_i = r_i where r_i > 0, else 0.

    Args:
        rewards: [N] rewards.

    Returns:
        [N] coefficients in the unit of the reward.

    Source:
        Dong et al. 2023, RAFT, arXiv 2304.06767; in the form that trains on every positive sample, Xiong et
        al. 2025, A Minimalist Approach to LLM Reasoning, arXiv 2504.11343.

    Example:
        >>> positive_only([1.0, 0.0, -0.5])
        [1.0, 0.0, 0.0]
    """
    return [max(reward, 0.0) for reward in rewards]


def above(rewards: Sequence[float], *, baseline: float) -> list[float]:
    """Return REINFORCE's advantages against a fixed baseline: A_i = r_i - baseline.

    Args:
        rewards: [N] rewards.
        baseline: In the unit of the reward; must not depend on these rewards, or the gradient is biased.

    Returns:
        [N] advantages in the unit of the reward.

    Source:
        Williams 1992, Simple statistical gradient-following algorithms, Machine Learning 8.

    Example:
        >>> above([1.0, 0.0], baseline=0.25)
        [0.75, -0.25]
    """
    return [reward - baseline for reward in rewards]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMean:
    """The mean of all rewards of past steps, which is the baseline of the next one.

    Example:
        >>> RunningMean().extended([1.0, 0.0]).extended([1.0, 1.0]).mean
        0.75
    """

    num_rewards: int = 0
    mean: float = 0.0
    """0.0 before the first step: its baseline is 0."""

    def extended(self, rewards: Sequence[float]) -> RunningMean:
        """Return the mean that includes these rewards too: mean + sum(r_i - mean) / n."""
        total = self.num_rewards + len(rewards)
        if total == 0:
            return self
        shift = math.fsum(reward - self.mean for reward in rewards) / total
        return RunningMean(num_rewards=total, mean=self.mean + shift)
