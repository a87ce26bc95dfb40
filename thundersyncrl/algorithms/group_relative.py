"""Advantages that compare the trajectories of one group, each a pure function of the group's rewards.

Legend: G trajectories of one group. `mean` and `std` run over the group. Everything is centred before it is
squared or divided, so rewards with a large common offset keep the accuracy of their differences, and a group
with equal rewards gets exactly 0.0. A group of one has nothing to be compared with and gets 0.0 as well.

A trajectory without action tokens has a reward like any other, and that reward counts in the baseline of its
group; only OPO's length-weighted baseline leaves it out, because its weight there is its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from thundersyncrl.errors import ContractError

TRL_EPSILON = 1e-4
"""Added to the deviation by TRL's GRPOTrainer (`advantages / (std_rewards + 1e-4)`); the GRPO paper has
none."""
NEMO_RL_EPSILON = 1e-6
"""Added to the deviation by NeMo-RL's advantage estimator."""


def centered(values: Sequence[float]) -> list[float]:
    """Return each value minus the mean of all.

    The first value is taken off before the mean is formed: differences of close numbers are exact, their raw
    sum is not.

    Args:
        values: [G] or [N] finite numbers; may be empty.

    Returns:
        Same length; exactly 0.0 everywhere when all values are equal.

    Example:
        >>> centered([10001.0, 10000.0, 10002.0])
        [0.0, -1.0, 1.0]
    """
    if not values:
        return []
    differences = [value - values[0] for value in values]
    mean = math.fsum(differences) / len(differences)
    return [difference - mean for difference in differences]


def deviation(values: Sequence[float], *, sample: bool = False) -> float:
    """Return the standard deviation: sqrt(sum (x - mean)^2 / n), or / (n - 1) when `sample`.

    Args:
        values: [N] finite numbers.
        sample: Divide by n - 1, as `torch.std` does by default.

    Returns:
        The deviation, in the unit of the values; 0.0 when fewer than two values leave nothing to compare.

    Example:
        >>> deviation([-3.0, -3.0, 5.0, 5.0]), round(deviation([-3.0, -3.0, 5.0, 5.0], sample=True), 3)
        (4.0, 4.619)
    """
    count = len(values) - 1 if sample else len(values)
    if count < 1:
        return 0.0
    return math.hypot(*centered(values)) / math.sqrt(count)


def normalized(rewards_G: Sequence[float], *, epsilon: float = TRL_EPSILON, sample: bool = False) -> list[float]:
    """Return GRPO's advantages: A_i = (r_i - mean) / (std + epsilon).

    Args:
        rewards_G: [G] rewards of one group.
        epsilon: In the unit of the reward; keeps nearly equal rewards from being blown up.
        sample: Sample deviation instead of population deviation; the paper doesn't say which.

    Returns:
        [G] advantages without unit.

    Source:
        Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision).

    Example:
        >>> [round(a, 3) for a in normalized([1.0, 0.0, 0.0, 0.0])]
        [1.732, -0.577, -0.577, -0.577]
        >>> normalized([0.3, 0.3, 0.3])
        [0.0, 0.0, 0.0]
    """
    scale = deviation(rewards_G, sample=sample) + epsilon
    return [value / scale if value else 0.0 for value in centered(rewards_G)]


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """Return RLOO's advantages: A_i = r_i - mean(r_j for j != i) = G / (G - 1) * (r_i - mean).

    Unbiased, because the baseline of trajectory i never sees trajectory i.

    Args:
        rewards_G: [G] rewards of one group.

    Returns:
        [G] advantages in the unit of the reward; they sum to zero.

    Source:
        Ahmadian et al. 2024, Back to Basics, arXiv 2402.14740.

    Example:
        >>> leave_one_out([1.0, 0.0, 0.0])
        [1.0, -0.5, -0.5]
    """
    size = len(rewards_G)
    if size < 2:
        return [0.0] * size
    return [value * size / (size - 1) for value in centered(rewards_G)]


def leave_one_out_normalized(rewards_G: Sequence[float], *, epsilon: float = NEMO_RL_EPSILON) -> list[float]:
    """Return A_i = (r_i - mean_{j != i}) / (std_{j != i} + epsilon), both over the siblings of i.

    The deviation is the sample deviation. Where the siblings all got the same reward their deviation is 0 and
    A_i isn't divided. Since each trajectory has its own divisor, A is no affine function of r.

    Args:
        rewards_G: [G] rewards of one group.
        epsilon: In the unit of the reward.

    Returns:
        [G] advantages.

    Source:
        NeMo-RL, its default for GRPO (leave-one-out baseline with normalised rewards).

    Example:
        >>> [round(a, 3) for a in leave_one_out_normalized([1.0, 0.0, 0.0, 0.0])]
        [1.0, -0.577, -0.577, -0.577]
    """
    advantages: list[float] = []
    for index, advantage in enumerate(leave_one_out(rewards_G)):
        siblings = [*rewards_G[:index], *rewards_G[index + 1 :]]
        sibling_deviation = deviation(siblings, sample=True)
        advantages.append(advantage / (sibling_deviation + epsilon) if sibling_deviation > 0.0 else advantage)
    return advantages


def length_weighted(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> list[float]:
    """Return OPO's advantages: A_i = r_i - sum_j l_j r_j / sum_j l_j.

    The baseline of least variance when the squared norm of a trajectory's score gradient grows with its
    length.

    Args:
        rewards_G: [G] rewards of one group.
        lengths_G: [G] action tokens of each trajectory.

    Returns:
        [G] advantages in the unit of the reward. Without any token in the group the plain mean is the
        baseline.

    Raises:
        ContractError: rewards and lengths differ in number.

    Source:
        Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.

    Example:
        >>> length_weighted([1.0, 0.0], [3, 1])
        [0.25, -0.75]
    """
    if len(rewards_G) != len(lengths_G):
        raise ContractError(
            f"expected one length per reward, got {len(lengths_G)} lengths for {len(rewards_G)} rewards; "
            "pass the action tokens of every member, 0 for an empty one"
        )
    total = sum(lengths_G)
    if total == 0:
        return centered(rewards_G)
    differences = [reward - rewards_G[0] for reward in rewards_G]
    baseline = math.fsum(n * d for n, d in zip(lengths_G, differences, strict=True)) / total
    return [difference - baseline for difference in differences]


def mean_normalized(rewards_G: Sequence[float]) -> list[float]:
    """Return MaxRL's advantages: A_i = (r_i - mean) / mean.

    With binary rewards, the mean over trajectories of A_i * score gradient estimates, without bias, the
    gradient of the log-likelihood of success expanded to order G - 1.

    Args:
        rewards_G: [G] rewards of one group, none below 0.

    Returns:
        [G] advantages without unit; all 0.0 when every reward is 0.

    Raises:
        ContractError: a reward below 0, for which dividing by the mean has no meaning.

    Source:
        Tajwar et al. 2026, Maximum Likelihood Reinforcement Learning, arXiv 2602.02710.

    Example:
        >>> mean_normalized([1.0, 0.0, 0.0, 0.0]), mean_normalized([0.0, 0.0])
        ([3.0, -1.0, -1.0, -1.0], [0.0, 0.0])
    """
    if any(reward < 0.0 for reward in rewards_G):
        raise ContractError(
            f"expected rewards of at least 0, got {min(rewards_G)} (MaxRL divides by the mean); turn KL "
            "and length terms off, or choose another estimator"
        )
    differences = centered(rewards_G)
    if not any(differences):
        return differences
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [difference / mean for difference in differences]


def clipped(advantages_G: Sequence[float], *, bound: float) -> list[float]:
    """Return each advantage limited to [-bound, bound].

    Bounds the pull of one rare success or failure in a large group. Advantages limited on one side only are
    no affine function of the rewards.

    Args:
        advantages_G: [G] advantages of one group.
        bound: Largest magnitude, above 0.

    Returns:
        [G] advantages.

    Example:
        >>> clipped([2.6, -0.4], bound=2.0)
        [2.0, -0.4]
    """
    return [min(max(advantage, -bound), bound) for advantage in advantages_G]
