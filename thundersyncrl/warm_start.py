"""Supervised warm start on the oracle's transcripts: same renderer, same loss mask, same learner as RL.

Maximising (1 / tokens) sum_i 1 * sum_t log pi(a_it) is the supervised loss, so a transcript is a trajectory whose
coefficient is known to be 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from thundersyncrl.algorithms.estimator import CoefficientClass, Estimator
from thundersyncrl.algorithms.weights import Normalizer
from thundersyncrl.config import LearnerConfig, WarmStartConfig
from thundersyncrl.environments.environment import EnvironmentFactory
from thundersyncrl.environments.task_order import TaskOrder
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.objective import Objective, WorkLimits
from thundersyncrl.learner.optimizer import PolicyOptimizer
from thundersyncrl.learner.policy import Policy
from thundersyncrl.observe.observer import Observer
from thundersyncrl.records import GroupId, Task, Trajectory, TrajectoryId
from thundersyncrl.rollout.renderer import Renderer
from thundersyncrl.rollout.transcripts import oracle_transcript

SUPERVISED = Estimator(
    name="supervised",
    coefficient=CoefficientClass.KNOWN,
    advantages=lambda groups, _: [[1.0] * len(g.rewards_G) for g in groups],
    min_group_size=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """The parts that supervised steps need."""

    policy: Policy
    renderer: Renderer
    environment_factory: EnvironmentFactory
    tasks: TaskOrder
    observer: Observer
    settings: WarmStartConfig
    pack_tokens: int


async def run_warm_start(warm: WarmStart) -> list[float]:
    """Run the supervised steps and return the mean log-prob of the oracle's tokens before each, in nats."""
    settings = warm.settings
    optimizer = PolicyOptimizer(
        warm.policy.trained,
        LearnerConfig(learning_rate=settings.learning_rate, betas=(0.9, 0.95)),
        total_steps=settings.steps,
    )
    learner = Learner(
        warm.policy,
        Objective(estimator=SUPERVISED, normalizer=Normalizer(name="token")),
        WorkLimits(stream="batch", pack_tokens=warm.pack_tokens, compare_behavior=False),
        optimizer,
    )
    logprobs: list[float] = []
    for step in range(settings.steps):
        transcripts = await _transcripts(warm, warm.tasks.take(settings.batch_size), step)
        logprobs.append(await asyncio.to_thread(_supervised_step, learner, transcripts))
        warm.observer.progress("warm-start steps", step + 1, settings.steps)
    return logprobs


async def _transcripts(warm: WarmStart, tasks: Sequence[Task], step: int) -> list[Trajectory]:
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(
                oracle_transcript(
                    task, warm.renderer, warm.environment_factory, id=TrajectoryId(step, index, 0), version=step
                )
            )
            for index, task in enumerate(tasks)
        ]
    return [task.result() for task in running]


def _supervised_step(learner: Learner, transcripts: Sequence[Trajectory]) -> float:
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
