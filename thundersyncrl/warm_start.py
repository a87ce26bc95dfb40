"""Supervised warm start on the oracle's transcripts: same renderer, same loss mask, same learner as RL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from thundersyncrl.config import WarmStartConfig
from thundersyncrl.environments.environment import EnvironmentFactory
from thundersyncrl.environments.task_order import TaskOrder
from thundersyncrl.observe.observer import Observer
from thundersyncrl.records import Task, Trajectory, TrajectoryId
from thundersyncrl.rollout.renderer import Renderer
from thundersyncrl.rollout.transcripts import oracle_transcript
from thundersyncrl.runtime.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """The parts that supervised steps need."""

    trainer: Trainer
    renderer: Renderer
    environment_factory: EnvironmentFactory
    tasks: TaskOrder
    observer: Observer
    settings: WarmStartConfig


async def run_warm_start(warm: WarmStart) -> list[float]:
    """Run the supervised steps and return the mean log-prob of the oracle's tokens before each, in nats."""
    settings = warm.settings
    await warm.trainer.begin_supervised(settings)
    logprobs: list[float] = []
    for step in range(settings.steps):
        transcripts = await _transcripts(warm, warm.tasks.take(settings.batch_size), step)
        logprobs.append(await warm.trainer.supervised_step(transcripts))
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
