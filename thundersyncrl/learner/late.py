"""What a step's late numbers are: the advantages of complete groups, and the divisor of the settled gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thundersyncrl.algorithms.estimator import CoefficientClass, GroupRewards
from thundersyncrl.algorithms.shaping import reward_spread
from thundersyncrl.learner.ledger import Coefficients
from thundersyncrl.learner.objective import Objective
from thundersyncrl.learner.queue import GroupWork


def min_survivors(objective: Objective) -> int:
    """Return the survivors below which a group is dropped; classes that don't compare inside a group need one."""
    estimator = objective.estimator
    compares = estimator.coefficient not in (CoefficientClass.KNOWN, CoefficientClass.AFFINE_BATCH)
    return estimator.min_group_size if compares else 1


def late_advantages(objective: Objective, groups: Sequence[GroupWork], baseline: float) -> list[list[float]]:
    """Return the advantages of each group's survivors, in member order.

    Args:
        groups: all compared with one another where the estimator's statistics are the batch's.
        baseline: running mean of past rewards.
    """
    rewards = [
        GroupRewards(
            rewards_G=tuple(g.rewards[m] for m in g.survivors),
            lengths_G=tuple(len(g.branches[m].target_ids) for m in g.survivors),
        )
        for g in groups
    ]
    values = objective.estimator.advantages(rewards, baseline) if groups else []
    return [[float(v) for v in of_group] for of_group in values]


def step_scale(objective: Objective, groups: Sequence[GroupWork]) -> float:
    """Return the factor on the summed gradient: one over the divisor, times the estimator's factor of the batch."""
    counted = [g for g in groups if _counts(objective, g)]
    lengths = [len(g.branches[m].target_ids) for g in counted for m in g.survivors]
    if not sum(lengths):
        return 0.0
    scale = 1.0 / objective.normalizer.divisor(lengths)
    late = objective.estimator.batch_scale
    if late is not None:
        scale *= late([[g.advantages[m] for m in g.survivors] for g in counted])
    return scale


def _counts(objective: Objective, work: GroupWork) -> bool:
    """Return whether a group's trajectories are in the divisor."""
    if len(work.survivors) < min_survivors(objective):
        return False
    uniform = len(set(work.rewards.values())) <= 1
    return not (uniform and objective.estimator.drops_uniform_groups)


def coefficients_of(groups: Sequence[GroupWork]) -> Coefficients:
    """Return the rewards and advantages of the groups' survivors."""
    kept = [g for g in groups if g.advantages]
    return Coefficients(
        rewards={m: g.rewards[m] for g in kept for m in g.survivors},
        advantages={m: g.advantages[m] for g in kept for m in g.survivors},
    )


def spread(groups: Sequence[GroupWork]) -> Mapping[str, float]:
    """Return the step's metrics of how rewards and advantages lie apart."""
    rewards = [[g.rewards[m] for m in g.survivors] for g in groups]
    return reward_spread(rewards, [[g.advantages[m] for m in g.survivors] for g in groups]).metrics()
