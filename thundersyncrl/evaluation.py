"""Pass rate of the engine's policy on held-out tasks. No learner, no gradient."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from thundersyncrl.errors import RolloutError
from thundersyncrl.observe.observer import EvaluationResult, Observer
from thundersyncrl.records import Reward, Task, Trajectory, TrajectoryId
from thundersyncrl.rollout.driver import Episode
from thundersyncrl.rollout.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One held-out trajectory and its verdict, if it got one."""

    trajectory: Trajectory
    reward: Reward | None


async def evaluate(
    setting: Setting, tasks: Sequence[Task], *, samples_per_task: int, observer: Observer
) -> EvaluationResult:
    """Return pass rates over `samples_per_task` trajectories of every task."""
    started = time.perf_counter()
    ends = await play_all(setting, tasks, samples_per_task=samples_per_task, observer=observer)
    return summarise(ends, seconds=time.perf_counter() - started)


async def play_all(
    setting: Setting, tasks: Sequence[Task], *, samples_per_task: int, observer: Observer
) -> list[Evaluated]:
    """Return the graded trajectories of every task, in order; a failure is a trajectory without a reward."""
    done = 0

    async def one(group: int, member: int, task: Task) -> Evaluated:
        nonlocal done
        async with Episode(setting, id=TrajectoryId(0, group, member), task=task) as episode:
            trajectory = await episode.play()
            reward = None
            if trajectory.outcome.is_usable:
                try:
                    reward = await episode.grade()
                except RolloutError:
                    reward = None  # no verdict: counted as failed, in no rate
        done += 1
        observer.progress("graded trajectories", done, len(tasks) * samples_per_task)
        return Evaluated(trajectory=trajectory, reward=reward)

    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(one(index, member, task))
            for index, task in enumerate(tasks)
            for member in range(samples_per_task)
        ]
    return [task.result() for task in running]


def summarise(ends: Sequence[Evaluated], *, seconds: float) -> EvaluationResult:
    """Return pass rates in all, by kind, and on the tasks that need several turns; reward 1 is a pass."""
    passes: dict[str, list[bool]] = defaultdict(list)
    several: list[bool] = []
    for end in ends:
        if end.reward is None:
            continue
        passed = end.reward.value >= 1.0
        passes[end.trajectory.task.kind or "task"].append(passed)
        if end.trajectory.task.several_turns:
            several.append(passed)
    graded = [p for of_kind in passes.values() for p in of_kind]
    return EvaluationResult(
        num=len(graded),
        pass_rate=_rate(graded),
        by_kind={kind: _rate(of_kind) for kind, of_kind in sorted(passes.items())},
        several_turns_pass_rate=_rate(several) if several else None,
        num_failed=len(ends) - len(graded),
        seconds=seconds,
    )


def _rate(passed: Sequence[bool]) -> float:
    return sum(passed) / max(len(passed), 1)
