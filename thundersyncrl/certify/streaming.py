"""The gradient that the learner hands to its optimizer when a batch is streamed in a given arrival order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from thundersyncrl.algorithms.own_reward import RunningMean
from thundersyncrl.certify.arrivals import arrivals, limits_of_order, play
from thundersyncrl.certify.cases import Batch
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.objective import Objective
from thundersyncrl.learner.optimizer import PolicyOptimizer
from thundersyncrl.learner.policy import Policy
from thundersyncrl.learner.queue import WorkClass


class GradientProbe:
    """Stands where the optimizer stands: keeps the settled gradient and leaves the parameters as they are."""

    learning_rate = 0.0

    def __init__(self) -> None:
        self.gradient: list[Tensor] = []

    def ascend(self, gradient: Sequence[Tensor]) -> float:
        self.gradient = list(gradient)
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """The settled gradient of one streamed step, and the packs that it took."""

    gradient: list[Tensor]
    """By trained parameter, in the policy's order; zeros when nothing carried a signal."""
    num_packs: Mapping[str, int]
    """By work class."""


def streamed_gradient(
    policy: Policy, objective: Objective, batch: Batch, *, stream: str, order: int, baseline: float
) -> Streamed:
    """Return what one step of the learner computes; the policy stays as it is.

    Args:
        stream: level.
        order: seed of the arrival order and of how work is cut.
        baseline: running mean of past rewards, for estimators that need one.
    """
    probe = GradientProbe()
    limits = limits_of_order(order, stream=stream)
    learner = Learner(policy, objective, limits, cast(PolicyOptimizer, probe))
    learner.running_mean = RunningMean(num_rewards=1, mean=baseline)
    metrics = play(learner, batch, arrivals(batch, order))
    gradient = probe.gradient or [torch.zeros_like(p) for p in policy.trained.values()]
    return Streamed(gradient=gradient, num_packs={kind.value: int(metrics[f"num_{kind}_packs"]) for kind in WorkClass})
