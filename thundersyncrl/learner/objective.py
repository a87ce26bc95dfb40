"""What a step maximises, and how its gradient work is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thundersyncrl.algorithms.estimator import Estimator
from thundersyncrl.algorithms.weights import Normalizer
from thundersyncrl.learner.branch import BranchTokens

RewardShaper = Callable[[BranchTokens, float], float]
"""(branch, verifier's reward) -> reward that is compared; runs in the compute thread, may score a reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What one step maximises: (1 / divisor) sum_i A_i sum_t w_it log pi(a_it)."""

    estimator: Estimator
    normalizer: Normalizer
    temperature: float = 1.0
    importance_cap: float | None = None
    stale_importance_cap: float = 2.0
    """For tokens of older versions, where `importance_cap` is None."""
    shape_reward: RewardShaper | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimits:
    """How learner work is cut."""

    stream: str = "trajectory"
    pack_tokens: int = 2048
    graph_tokens: int = 4096
    """Tokens whose graphs may wait: prompts for their walk (further ones run forward again), and with `stream = "turn"`
    or "auto" live trajectories for their end (further ones run when their text is complete)."""
    early_tokens: int = 96
    """New tokens of a live trajectory that are worth an early forward; fewer wait for the next turn or the end."""
    max_open_groups: int = 64
    shares_cores: bool = False
    """Whether learner work takes time from the engine; with `stream = "auto"`."""
    max_mismatch: float | None = None
    max_staleness: int = 0
    """By how many versions a trajectory's may be older than the learner's; 0 refuses every other version."""
    compare_behavior: bool = True
    """Measure learner against behavior log-probs; off for supervised transcripts, which nobody sampled."""
