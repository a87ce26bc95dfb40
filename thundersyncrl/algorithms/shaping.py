"""Detached terms of the reward (length, KL), and what the rewards of a step say about its signal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thundersyncrl.algorithms.group_relative import deviation
from thundersyncrl.errors import ConfigError, ContractError, NumericsError

KlEstimator = Literal["k1", "k3"]


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """Return DAPO's soft overlong term, added to the reward.

    0 up to max_length - buffer, then falling in a straight line to -1 at max_length, and -1 beyond.

    Args:
        length: Action tokens of the trajectory.
        max_length: Tokens at which the penalty is full.
        buffer: Tokens over which it grows, 1 to max_length.

    Returns:
        A number from -1 to 0, in the unit of the reward.

    Raises:
        ConfigError: the buffer isn't between 1 and max_length.

    Source:
        Yu et al. 2025, DAPO, arXiv 2503.14476, equation 13.

    Example:
        >>> [overlong_penalty(n, max_length=100, buffer=20) for n in (80, 90, 100, 120)]
        [0.0, -0.5, -1.0, -1.0]
    """
    if not 1 <= buffer <= max_length:
        raise ConfigError(
            f"expected an overlong buffer between 1 and {max_length} tokens, got {buffer}; "
            "`algorithm.overlong_tokens` lies within `rollout.max_action_tokens`"
        )
    excess = length - (max_length - buffer)
    return -min(excess / buffer, 1.0) if excess > 0 else 0.0


def kl_to_reference(
    policy_logprobs: Sequence[float], reference_logprobs: Sequence[float], *, estimator: KlEstimator = "k1"
) -> float:
    """Return the estimated KL(policy || reference) of one trajectory, summed over its action tokens.

    With d = log ref - log pi of a sampled token: k1 = -d, k3 = exp(d) - 1 - d. Both are unbiased for tokens
    sampled from the policy; k1 may be negative, k3 never is. As a detached reward term only k1 gives the
    gradient of the KL, because that gradient is E[grad log pi * (log pi - log ref)].

    Args:
        policy_logprobs: [T] nats, the learner's.
        reference_logprobs: [T] nats, the reference policy's for the same tokens.
        estimator: "k1" or "k3".

    Returns:
        Nats per trajectory.

    Raises:
        ContractError: the two differ in number.
        NumericsError: the result isn't finite.

    Source:
        Schulman 2020, Approximating KL Divergence.

    Example:
        >>> kl_to_reference([-1.0, -2.0], [-1.5, -2.0])
        0.5
        >>> round(kl_to_reference([-1.0], [-1.5], estimator="k3"), 4)
        0.1065
    """
    if len(policy_logprobs) != len(reference_logprobs):
        raise ContractError(
            f"expected one reference log-prob per policy log-prob, got {len(reference_logprobs)} for "
            f"{len(policy_logprobs)} tokens; both cover the action tokens only"
        )
    differences = [q - p for p, q in zip(policy_logprobs, reference_logprobs, strict=True)]
    try:
        terms = [-d if estimator == "k1" else math.expm1(d) - d for d in differences]
        total = math.fsum(terms)
    except (OverflowError, ValueError):
        total = math.inf
    if not math.isfinite(total):
        raise NumericsError(
            f"expected a finite KL to the reference, got {total} (largest log-prob difference "
            f"{max(differences, key=abs)} nats); look at the reference's log-probs"
        )
    return total


def shaped_reward(reward: float, *, kl: float, kl_coefficient: float, overlong: float = 0.0) -> float:
    """Return the reward that advantages are computed from: reward + overlong - kl_coefficient * kl.

    Example:
        >>> shaped_reward(1.0, kl=2.0, kl_coefficient=0.1, overlong=-0.5)
        0.3
    """
    return reward + overlong - kl_coefficient * kl


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpread:
    """Two spreads that are easily mistaken for each other, and the share of groups that teach nothing."""

    within_group_std: float
    """Mean over groups of the sample deviation inside the group: what group-relative advantages see."""
    batch_std: float
    """Sample deviation over all trajectories of the step: large when tasks differ, signal or not."""
    zero_signal_fraction: float
    """Share of groups whose advantages are all 0; 1.0 means that the step can't teach anything."""

    def metrics(self) -> dict[str, float]:
        """Return the three under the names of the metrics file."""
        return {
            "reward_std_within_groups": self.within_group_std,
            "reward_std_over_batch": self.batch_std,
            "zero_signal_group_fraction": self.zero_signal_fraction,
        }


def reward_spread(rewards: Sequence[Sequence[float]], advantages: Sequence[Sequence[float]]) -> RewardSpread:
    """Return the spread of a step's rewards.

    Args:
        rewards: Rewards by group.
        advantages: Advantages in the same nesting.

    Returns:
        The spread; all 0.0 for a step without groups.

    Example:
        >>> spread = reward_spread([[-3.0, -3.0], [5.0, 5.0]], [[0.0, 0.0], [0.0, 0.0]])
        >>> spread.within_group_std, round(spread.batch_std, 3), spread.zero_signal_fraction
        (0.0, 4.619, 1.0)
    """
    if not rewards:
        return RewardSpread(within_group_std=0.0, batch_std=0.0, zero_signal_fraction=0.0)
    within = math.fsum(deviation(group, sample=True) for group in rewards) / len(rewards)
    everything = [reward for group in rewards for reward in group]
    silent = sum(not any(group) for group in advantages)
    return RewardSpread(
        within_group_std=within,
        batch_std=deviation(everything, sample=True),
        zero_signal_fraction=silent / len(rewards),
    )
