"""What one step counted: packs, tokens, and how far learner and behavior log-probs lie apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thundersyncrl.errors import NumericsError
from thundersyncrl.learner.branch import BranchTokens
from thundersyncrl.learner.queue import Pack, WorkClass
from thundersyncrl.records import TrajectoryId


@dataclass(slots=True)
class Tally:
    """Counters of one step."""

    num_packs: Counter[str] = field(default_factory=Counter[str])
    members: dict[TrajectoryId, str] = field(default_factory=dict[TrajectoryId, str])
    """Class in which each trajectory's gradient was taken."""
    early: set[TrajectoryId] = field(default_factory=set[TrajectoryId])
    """Trajectories of which something ran forward before the text was complete."""
    num_tokens: int = 0
    num_scored: int = 0
    num_compared: int = 0
    """Tokens whose behavior log-probs are of the learner's own version, so that they should be equal."""
    staleness: dict[TrajectoryId, int] = field(default_factory=dict[TrajectoryId, int])
    """By how many versions each trained trajectory was older than the learner."""
    num_capped: int = 0
    """Tokens whose importance weight was truncated."""
    mismatch_max: float = 0.0
    mismatch_sum: float = 0.0
    logprob_sum: float = 0.0
    busy_s: float = 0.0

    def count(self, pack: Pack, num_tokens: int) -> None:
        """Count a pack that ran, and the tokens that it ran forward."""
        self.num_tokens += num_tokens
        self.num_packs[pack.work_class] += 1
        self.members.update({branch.id: pack.work_class.value for branch in pack.branches})

    @property
    def level(self) -> str:
        """The finest level at which work was done."""
        if self.num_packs[WorkClass.EARLY]:
            return "turn"
        return "trajectory" if self.num_packs[WorkClass.CONTENT] or self.num_packs[WorkClass.KNOWN] else "group"

    def count_early(self, member: TrajectoryId, num_tokens: int) -> None:
        """Count an early forward that ran."""
        self.num_packs[WorkClass.EARLY] += 1
        self.num_tokens += num_tokens
        self.early.add(member)

    def measure(self, branch: BranchTokens, logprobs: Tensor, *, compare: bool, bound: float | None) -> None:
        """Count a branch's [A] log-probs and compare them with what the engine sampled from.

        Raises:
            NumericsError: a log-prob isn't finite, or lies further than `bound` nats from the engine's.
        """
        if not bool(torch.isfinite(logprobs).all()):
            raise NumericsError(
                f"expected finite log-probs, got {logprobs[~torch.isfinite(logprobs)][0]} ({branch.id})"
            )
        self.logprob_sum += float(logprobs.sum())
        self.num_scored += len(branch.target_ids)
        if not compare:
            return
        self.num_compared += len(branch.target_ids)
        behavior = torch.tensor(branch.behavior_logprobs, dtype=torch.float64)
        difference = (logprobs.double().cpu() - behavior).abs()
        worst = float(difference.max())
        self.mismatch_max = max(self.mismatch_max, worst)
        self.mismatch_sum += float(difference.sum())
        if bound is not None and not worst <= bound:
            raise NumericsError(
                f"expected learner and behavior log-probs within {bound} nats, got {worst:.3g} ({branch.id}); "
                "the engine samples from other weights or another temperature than the learner scores with"
            )

    def weigh(self, member: TrajectoryId, staleness: int, num_capped: int) -> None:
        """Count how old a trajectory was, and how many of its importance weights were truncated."""
        self.staleness[member] = staleness
        self.num_capped += num_capped

    def staleness_metrics(self) -> dict[str, float]:
        """Return what a step that may train on older versions reports of them."""
        ages = self.staleness.values()
        return {
            "staleness_mean": sum(ages) / max(len(ages), 1),
            "staleness_max": float(max(ages, default=0)),
            "capped_weights": self.num_capped / max(self.num_scored, 1),
        }

    def metrics(self, survivors: set[TrajectoryId]) -> dict[str, float]:
        """Return the step's metrics of learner work; `survivors` are the trajectories with a reward."""
        scored = max(self.num_scored, 1)
        by_class = Counter(self.members.values())
        by_class[WorkClass.EARLY] = len(self.early & self.members.keys())
        return {
            "mismatch_max": self.mismatch_max,
            "mismatch_mean": self.mismatch_sum / max(self.num_compared, 1),
            "logprob_mean": self.logprob_sum / scored,
            "num_skipped": float(len(survivors - self.members.keys())),
            "learner_tokens": float(self.num_tokens),
            "learner_busy_s": self.busy_s,
            **{f"num_{c}_packs": float(self.num_packs[c]) for c in WorkClass},
            **{f"num_{c}_trajectories": float(by_class[c]) for c in WorkClass},
        }
