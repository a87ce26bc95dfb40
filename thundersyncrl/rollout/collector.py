"""Plays the groups of a step and hands every trajectory on the moment it is complete, and its reward when it lands.

| who        | waits for                | released by                                     |
| ---------- | ------------------------ | ----------------------------------------------- |
| a member   | a place, where limited   | a member that ended                             |
| a member   | its episode              | the engine, the environment, or a named limit   |
| `play`     | all members of its wave  | each ends with text and reward, or with a reason |
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from thundersyncrl.errors import RolloutError
from thundersyncrl.records import GroupId, Outcome, Reward, Status, Task, Trajectory, TrajectoryId, Turn
from thundersyncrl.rollout.boundary import outcome_of
from thundersyncrl.rollout.driver import Episode
from thundersyncrl.rollout.setting import Setting
from thundersyncrl.rollout.task_history import TaskHistory

EVERY_PLACE: AbstractAsyncContextManager[Any] = nullcontext()
"""No limit on how many trajectories are played at once."""

RETRIED = frozenset({"engine", "environment", "tool", "cancelled", "crash"})
"""Failure kinds that aren't the model's doing: the trajectory is sampled again from its start."""


class Sink(Protocol):
    """Takes what the collector hands on; the learner is one."""

    def open_group(self, group: GroupId, members: Iterable[TrajectoryId]) -> None: ...

    def turn(self, member: TrajectoryId, turns: Sequence[Turn], *, expected_turns: float | None = None) -> None: ...

    def text(self, trajectory: Trajectory) -> None: ...

    def reward(self, member: TrajectoryId, reward: float) -> None: ...

    def lose(self, member: TrajectoryId) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One trajectory's end: its text, and a reward or the reason why there is none."""

    trajectory: Trajectory
    reward: Reward | None
    outcome: Outcome
    """Of the whole: the trajectory's own, or the verifier's failure."""


@dataclass(slots=True)
class Collector:
    """Plays groups for one step.

    Args:
        setting: what all episodes share.
        sink: where texts and rewards go.
        on_played: called with each trajectory's end.
        history: of earlier trajectories; it decides who starts first, and learns from this step's.
    """

    setting: Setting
    sink: Sink
    step: int
    group_size: int
    max_retries: int
    on_played: Callable[[Played], None]
    history: TaskHistory = field(default_factory=TaskHistory)
    played: list[Played] = field(default_factory=list[Played])
    num_groups: int = 0

    async def play(self, tasks: Sequence[Task], *, places: AbstractAsyncContextManager[Any] = EVERY_PLACE) -> None:
        """Play one group per task, longest first; return when every member has ended.

        Args:
            tasks: one a group.
            places: held by each member while it is played; without a limit all are played at once.
        """
        members: dict[str, list[TrajectoryId]] = {}
        for task in tasks:  # a group's number, its seeds and its place in packs don't depend on the history
            group = GroupId(self.step, self.num_groups)
            self.num_groups += 1
            ids = [TrajectoryId(group.step, group.group, m) for m in range(self.group_size)]
            self.sink.open_group(group, ids)
            members.setdefault(task.id, []).extend(ids)
        async with asyncio.TaskGroup() as tasks_of_wave:
            for task in self.history.longest_first(tasks):
                for id in members.pop(task.id, ()):
                    tasks_of_wave.create_task(self._placed(id, task, places), name=f"trajectory {id}")

    async def _placed(self, id: TrajectoryId, task: Task, places: AbstractAsyncContextManager[Any]) -> None:
        async with places:
            await self._member(id, task)

    async def _member(self, id: TrajectoryId, task: Task) -> None:
        on_turn = partial(self.sink.turn, expected_turns=self.history.expected_turns(task))
        for attempt in range(self.max_retries + 1):
            async with Episode(self.setting, id=id, task=task, on_turn=on_turn) as episode:
                trajectory = await episode.play()
                failed = trajectory.outcome.status is Status.FAILED
                if failed and trajectory.outcome.cause in RETRIED and attempt < self.max_retries:
                    continue
                end = await self._hand_over(episode, trajectory)
            self.played.append(end)
            if end.trajectory.outcome.is_usable:
                self.history.add(end.trajectory)
            self.on_played(end)
            return

    async def _hand_over(self, episode: Episode, trajectory: Trajectory) -> Played:
        id = trajectory.id
        if not trajectory.outcome.is_usable:
            self.sink.lose(id)
            return Played(trajectory=trajectory, reward=None, outcome=trajectory.outcome)
        self.sink.text(trajectory)  # before the verifier runs
        try:
            reward = await episode.grade()
        except RolloutError as error:
            self.sink.lose(id)
            return Played(trajectory=trajectory, reward=None, outcome=outcome_of(error))
        self.sink.reward(id, reward.value)
        return Played(trajectory=trajectory, reward=reward, outcome=trajectory.outcome)

    @property
    def num_uniform_groups(self) -> int:
        """Groups whose rewards are all equal, so that they carry no signal."""
        rewards: dict[GroupId, set[float]] = {}
        for end in self.played:
            values = rewards.setdefault(end.trajectory.id.group_id, set())
            if end.reward is not None:
                values.add(end.reward.value)
        return sum(len(values) <= 1 for values in rewards.values())

    @property
    def failures(self) -> Counter[str]:
        """Failed trajectories by kind."""
        return Counter(p.outcome.cause for p in self.played if p.outcome.status is Status.FAILED)
