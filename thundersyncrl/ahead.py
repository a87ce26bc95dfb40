"""The asynchronous loop, for comparison: rollouts of later steps run under older versions while a step trains.

| who                  | waits for                                    | released by                            |
| -------------------- | -------------------------------------------- | -------------------------------------- |
| rollouts of a step   | the step `max_staleness` before it           | that step's begin                      |
| a trajectory         | one of `groups_per_step * group_size` places | a trajectory that ended, of any step   |
| a text or reward     | the learner's begin of its step              | `HeldSink.release`                     |
| the optimizer step   | every trajectory of its step accounted for   | rollouts and learner                   |

Steps begin in order and places are given in order, so the oldest step's trajectories always run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from thundersyncrl.loop import AfterStep, Training, collector_of, roll_out, settle, show_progress
from thundersyncrl.records import GroupId, Trajectory, TrajectoryId, Turn
from thundersyncrl.rollout.collector import Collector, Sink


async def train_ahead(training: Training, *, first_step: int, num_steps: int, after_step: AfterStep) -> None:
    """Run steps `first_step` .. `num_steps` - 1 as `train` does, with rollouts up to `max_staleness` steps ahead.

    A trajectory that the learner takes is at most `max_staleness` versions older than the weights that it trains: its
    step's rollouts begin that many steps early at most. None are begun for a step beyond the last.
    """
    ahead = _Ahead(training)
    try:
        for step in range(first_step, num_steps):
            started = time.monotonic()
            await training.trainer.begin_step()
            ahead.launch(step, min(step + training.max_staleness, num_steps - 1))
            collector = await ahead.finish(step)
            report = await settle(training, collector, started)
            training.observer.step(report)
            await after_step(report, ahead.position_of(step + 1))
    finally:
        await ahead.cancel()


class HeldSink:
    """Keeps what rollouts hand on until the learner begins their step; then it goes on in the order in which it came.

    Of a trajectory that is still live then, only its newest turns go on; of one that is complete, only its text.

    Args:
        sink: takes all in the end.
    """

    def __init__(self, sink: Sink):
        self._sink = sink
        self._calls: list[Callable[[], None]] = []
        self._turns: dict[TrajectoryId, Callable[[], None]] = {}
        self._is_held = True

    def release(self) -> None:
        """Hand on what was kept, and from now on everything at once."""
        self._is_held = False
        for call in (*self._calls, *self._turns.values()):
            call()
        self._calls, self._turns = [], {}

    def _hand_on(self, call: Callable[[], None]) -> None:
        if self._is_held:
            self._calls.append(call)
        else:
            call()

    def open_group(self, group: GroupId, members: Iterable[TrajectoryId]) -> None:
        self._hand_on(partial(self._sink.open_group, group, tuple(members)))

    def turn(self, member: TrajectoryId, turns: Sequence[Turn], *, expected_turns: float | None = None) -> None:
        call = partial(self._sink.turn, member, tuple(turns), expected_turns=expected_turns)
        if self._is_held:
            self._turns[member] = call
        else:
            call()

    def text(self, trajectory: Trajectory) -> None:
        self._turns.pop(trajectory.id, None)
        self._hand_on(partial(self._sink.text, trajectory))

    def reward(self, member: TrajectoryId, reward: float) -> None:
        self._hand_on(partial(self._sink.reward, member, reward))

    def lose(self, member: TrajectoryId) -> None:
        self._turns.pop(member, None)
        self._hand_on(partial(self._sink.lose, member))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rollouts:
    """A step's, on their way."""

    task: asyncio.Task[None]
    collector: Collector
    sink: HeldSink
    position: int
    """In the tasks, before the step's first was drawn."""


class _Ahead:
    """The rollouts of the current step and of those after it."""

    def __init__(self, training: Training):
        self._training = training
        self._places = asyncio.Semaphore(training.groups_per_step * training.group_size)
        self._of_step: dict[int, _Rollouts] = {}
        self._current = -1

    def launch(self, first: int, last: int) -> None:
        """Begin the rollouts of these steps, where they haven't begun."""
        for step in range(first, last + 1):
            if step not in self._of_step:
                self._of_step[step] = self._begin(step)

    def _begin(self, step: int) -> _Rollouts:
        training, sink = self._training, HeldSink(self._training.trainer)
        collector = collector_of(training, step, sink, is_current=lambda: step == self._current)
        position, tasks = training.tasks.position, training.tasks.take(training.groups_per_step)
        rollouts = roll_out(training, collector, tasks, places=self._places)
        task = asyncio.create_task(rollouts, name=f"rollouts of step {step}")
        return _Rollouts(task=task, collector=collector, sink=sink, position=position)

    async def finish(self, step: int) -> Collector:
        """Give the learner a step's texts and rewards until its rollouts are over; any step's failure is raised."""
        rollouts, self._current = self._of_step[step], step
        rollouts.sink.release()
        show_progress(self._training, rollouts.collector)
        tasks = [r.task for r in self._of_step.values()]
        while True:
            for task in tasks:
                if task.done():
                    task.result()
            if rollouts.task.done():
                break
            await asyncio.wait([t for t in tasks if not t.done()], return_when=asyncio.FIRST_COMPLETED)
        del self._of_step[step]
        return rollouts.collector

    def position_of(self, step: int) -> int:
        """Return where in the tasks a step began, or would."""
        return self._of_step[step].position if step in self._of_step else self._training.tasks.position

    async def cancel(self) -> None:
        """End all rollouts that are on their way."""
        tasks = [rollouts.task for rollouts in self._of_step.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
