"""Tasks whose trajectories were long start first, under the numbers that they would have had anyway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.rollout.test_driver import DONE, RENDERER, engine_of, say
from thundersyncrl.environments.scripted import ScriptedEnvironment
from thundersyncrl.records import (
    GroupId,
    Outcome,
    Status,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)
from thundersyncrl.rollout.collector import Collector
from thundersyncrl.rollout.setting import Limits, Setting
from thundersyncrl.rollout.task_history import TaskHistory

TASKS = [Task(id=name, instruction=name) for name in "abcd"]


def played(task: Task, *, turns: int, tokens: int = 4, tool_s: float = 0.0, sample_s: float = 1.0) -> Trajectory:
    turn = Turn(observation_ids=(1,), action_ids=(2,) * tokens, behavior_logprobs=(-1.0,) * tokens, version=0)
    return Trajectory(
        id=TrajectoryId(0, 0, 0),
        task=task,
        turns=(turn,) * turns,
        outcome=Outcome(status=Status.COMPLETED),
        metrics={"tool_s": tool_s, "sample_s": sample_s},
    )


def test_without_history_the_order_stays() -> None:
    history = TaskHistory()
    assert history.longest_first(TASKS) == TASKS
    assert history.expected_turns(TASKS[0]) is None
    assert history.expected_s(TASKS[0]) is None


def test_longest_first_and_new_tasks_in_the_middle() -> None:
    history = TaskHistory()
    history.add(played(TASKS[0], turns=1))
    history.add(played(TASKS[1], turns=9))
    assert [t.id for t in history.longest_first(TASKS)] == ["b", "c", "d", "a"]


def test_slow_tools_count_as_much_as_many_tokens() -> None:
    history = TaskHistory()
    history.add(played(TASKS[0], turns=2, tool_s=0.1, sample_s=1.0))
    history.add(played(TASKS[1], turns=1, tool_s=30.0, sample_s=1.0))
    assert [t.id for t in history.longest_first(TASKS[:2])] == ["b", "a"]


def test_the_wait_for_a_place_does_not_make_a_task_long() -> None:
    history = TaskHistory()
    history.add(played(TASKS[0], turns=1, sample_s=50.0))
    history.add(played(TASKS[1], turns=2, sample_s=1.0))
    assert [t.id for t in history.longest_first(TASKS[:2])] == ["b", "a"]


def test_means_are_over_trajectories() -> None:
    history = TaskHistory()
    for turns in (1, 2, 6):
        history.add(played(TASKS[0], turns=turns, tool_s=3.0))
    assert history.expected_turns(TASKS[0]) == 3.0
    assert history.expected_s(TASKS[0]) == pytest.approx(3.0 + 12 * 3.0 / 36)


class Opened:
    """A sink that notes the order in which groups are announced."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def open_group(self, group: GroupId, members: Iterable[TrajectoryId]) -> None:
        self.groups.append(group.group)

    def turn(self, member: TrajectoryId, turns: Sequence[Turn], *, expected_turns: float | None = None) -> None: ...

    def text(self, trajectory: Trajectory) -> None: ...

    def reward(self, member: TrajectoryId, reward: float) -> None: ...

    def lose(self, member: TrajectoryId) -> None: ...


def test_a_group_keeps_its_number_whenever_it_starts() -> None:
    history, sink = TaskHistory(), Opened()
    for task, turns in zip(TASKS, random.Random(0).sample(range(1, 9), 4), strict=True):
        history.add(played(task, turns=turns))
    tasks = [*TASKS, TASKS[0]]
    limits: dict[str, Any] = {"max_turns": 2, "max_turn_tokens": 9, "max_action_tokens": 99, "context_tokens": 999}
    started: list[str] = []
    setting = Setting(
        engine=engine_of(say("hello")),
        renderer=RENDERER,
        environment_factory=lambda task: started.append(task.id) or ScriptedEnvironment([DONE]),
        limits=Limits(**limits, trajectory_limit_s=20.0, grade_limit_s=20.0),
        temperature=1.0,
        seed=0,
    )
    collector = Collector(
        setting=setting, sink=sink, step=3, group_size=2, max_retries=0, on_played=lambda end: None, history=history
    )
    order = history.longest_first(tasks)
    asyncio.run(collector.play(tasks))
    assert sink.groups == list(range(5))
    assert list(dict.fromkeys(started)) == list(dict.fromkeys(t.id for t in order)) != list("abcd")
    assert len(started) == 2 * len(tasks)
    assert {p.trajectory.id.group: p.trajectory.task.id for p in collector.played} == dict(enumerate("abcda"))
    assert history.expected_turns(TASKS[0]) != random.Random(0).sample(range(1, 9), 4)[0]
