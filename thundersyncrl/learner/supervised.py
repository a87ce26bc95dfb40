"""Supervised steps by the learner of RL: a transcript is a trajectory whose coefficient is known to be 1.

Maximising (1 / tokens) sum_i 1 * sum_t log pi(a_it) is the supervised loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from thundersyncrl.algorithms.estimator import CoefficientClass, Estimator
from thundersyncrl.algorithms.weights import Normalizer
from thundersyncrl.config import LearnerConfig, WarmStartConfig
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.objective import Objective, WorkLimits
from thundersyncrl.learner.optimizer import PolicyOptimizer
from thundersyncrl.learner.policy import Policy
from thundersyncrl.records import GroupId, Trajectory

SUPERVISED = Estimator(
    name="supervised",
    coefficient=CoefficientClass.KNOWN,
    advantages=lambda groups, _: [[1.0] * len(g.rewards_G) for g in groups],
    min_group_size=1,
)


class Supervised:
    """Takes one optimizer step per batch of transcripts, with an optimizer of its own.

    Args:
        policy: under training.
        settings: number of steps, learning rate.
        pack_tokens: largest pack.
    """

    def __init__(self, policy: Policy, settings: WarmStartConfig, *, pack_tokens: int):
        optimizer = PolicyOptimizer(
            policy.trained,
            LearnerConfig(learning_rate=settings.learning_rate, betas=(0.9, 0.95)),
            total_steps=settings.steps,
        )
        self._learner = Learner(
            policy,
            Objective(estimator=SUPERVISED, normalizer=Normalizer(name="token")),
            WorkLimits(stream="batch", pack_tokens=pack_tokens, compare_behavior=False),
            optimizer,
        )

    def step(self, transcripts: Sequence[Trajectory]) -> float:
        """Return the mean log-prob of the transcripts' action tokens before the step, in nats.

        Args:
            transcripts: of this learner's version, which is the number of steps taken.
        """
        learner = self._learner
        learner.begin_step()
        for transcript in transcripts:
            id = transcript.id
            learner.open_group(GroupId(id.step, id.group), [id])
            learner.text(transcript)
            learner.reward(id, 1.0)
        learner.seal()
        while learner.has_work:
            learner.run_once()
        return learner.finish_step()["logprob_mean"]
