"""Token weights of the score: the normalizer's, and truncated importance weights of tokens that others sampled.

| tokens of                  | weighed by                                                            |
| -------------------------- | --------------------------------------------------------------------- |
| the learner's own version  | 1, or with `importance_cap` min(exp(learner - behavior), that cap)    |
| an older version           | min(exp(learner - behavior), cap); `stale_importance_cap` if none set |

Every weight is detached, so that the loss stays linear in the score and in the advantage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thundersyncrl.algorithms.weights import truncated_importance
from thundersyncrl.errors import StaleWorkError
from thundersyncrl.learner.objective import Objective, WorkLimits
from thundersyncrl.learner.scoring import Scores
from thundersyncrl.learner.tally import Tally
from thundersyncrl.records import TrajectoryId, Turn


def weighted(scores: Scores, *, objective: Objective, limits: WorkLimits, tally: Tally, version: int) -> Tensor:
    """Return sum_t w_t log pi_t of one branch, with the graph of its log-probs, and count it.

    Args:
        scores: of the branch, under `version`.
        objective: has the normalizer and the caps.
        limits: whether and how strictly learner and engine are compared; only where both are of one version.
        tally: of the step.
        version: of the learner.
    """
    logprobs, branch = scores.logprobs, scores.branch
    detached = logprobs.detach()
    staleness = version - branch.version
    compare = limits.compare_behavior and not staleness
    tally.measure(branch, detached, compare=compare, bound=limits.max_mismatch)
    weight = objective.normalizer.token_weight(len(branch.target_ids))
    cap = objective.importance_cap
    if cap is None and staleness and limits.max_staleness:
        cap = objective.stale_importance_cap
    ratios = None if cap is None else truncated_importance(detached.tolist(), branch.behavior_logprobs, cap)
    tally.weigh(branch.id, staleness, sum(r >= cap for r in ratios) if ratios and cap else 0)
    if ratios is None:
        return logprobs.sum() * weight
    return (logprobs * torch.tensor(ratios, dtype=logprobs.dtype, device=logprobs.device)).sum() * weight


def refuse_stale(member: TrajectoryId, turns: Sequence[Turn], *, version: int, max_staleness: int) -> None:
    """Refuse turns of a version that the step can't take.

    Raises:
        StaleWorkError: one is newer than the learner's, or more than `max_staleness` versions older, or the turns are
            of several versions.
    """
    allowed = f"{version - max_staleness} to {version}" if max_staleness else f"{version}"
    for turn in turns:
        if not version - max_staleness <= turn.version <= version:
            raise StaleWorkError(
                f"expected a trajectory of policy version {allowed}, got version {turn.version} "
                f"({member}); sample it again, it must not be trained on"
            )
        if turn.version != turns[0].version:
            raise StaleWorkError(
                f"expected a trajectory of one policy version, got {turns[0].version} and then {turn.version} "
                f"({member}); sample it again, it must not be trained on"
            )
