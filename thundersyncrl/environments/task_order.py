"""The order in which training tasks are drawn: shuffled anew each epoch, the same for the same seed."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from thundersyncrl.errors import ConfigError
from thundersyncrl.records import Task


class TaskSource(Protocol):
    """Gives tasks one after the other."""

    position: int
    """Number of tasks drawn so far."""

    def take(self, num: int) -> list[Task]:
        """Return the next tasks and move on."""
        ...


class TaskOrder:
    """Draws tasks; `position` is all the state there is, so a resumed run goes on where it was.

    Args:
        tasks: at least one.
        seed: of the order.
        position: number of tasks drawn so far.
        weights: how often tasks of a kind come early in an epoch, against 1 for kinds that aren't named. Every task
            still comes once an epoch.

    Raises:
        ConfigError: no tasks, or a weight for a kind that no task has.

    Example:
        >>> order = TaskOrder([Task(id="a", instruction=""), Task(id="b", instruction="")], seed=0)
        >>> sorted(t.id for t in order.take(2)), order.position
        (['a', 'b'], 2)
    """

    def __init__(
        self, tasks: Sequence[Task], *, seed: int, position: int = 0, weights: Mapping[str, float] | None = None
    ):
        if not tasks:
            raise ConfigError("expected at least one training task, got none; check `tasks.train` and `tasks.kinds`")
        weights = weights or {}
        kinds = {task.kind for task in tasks}
        if unknown := sorted(set(weights) - kinds):
            raise ConfigError(
                f"expected weights of kinds among {', '.join(sorted(kinds))}, got {', '.join(unknown)}; correct "
                "`weights`, or choose such tasks in `tasks.kinds`"
            )
        self._tasks = tuple(tasks)
        self._weights = tuple(weights.get(task.kind, 1.0) for task in tasks)
        self._seed = seed
        self._shuffled = functools.lru_cache(maxsize=2)(self._shuffle)
        self.position = position

    def take(self, num: int) -> list[Task]:
        """Return the next tasks and move on."""
        drawn = [self._at(index) for index in range(self.position, self.position + num)]
        self.position += num
        return drawn

    def _at(self, index: int) -> Task:
        epoch, place = divmod(index, len(self._tasks))
        return self._tasks[self._shuffled(epoch)[place]]

    def _shuffle(self, epoch: int) -> list[int]:
        """Return the places of the tasks: drawn one after the other, each in proportion to its weight."""
        source = random.Random(f"{self._seed}/{epoch}")
        # The first of exponential clocks rings with a chance in proportion to its rate (Efraimidis and Spirakis, 2006).
        rings = [source.expovariate(weight) for weight in self._weights]
        return sorted(range(len(rings)), key=rings.__getitem__)
