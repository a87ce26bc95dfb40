"""The order in which training tasks are drawn: shuffled anew each epoch, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from thundersyncrl.errors import ConfigError
from thundersyncrl.records import Task


class TaskOrder:
    """Draws tasks; `position` is all the state there is, so a resumed run goes on where it was.

    Args:
        tasks: at least one.
        seed: of the order.
        position: number of tasks drawn so far.

    Example:
        >>> order = TaskOrder([Task(id="a", instruction=""), Task(id="b", instruction="")], seed=0)
        >>> sorted(t.id for t in order.take(2)), order.position
        (['a', 'b'], 2)
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, position: int = 0):
        if not tasks:
            raise ConfigError("expected at least one training task, got none; check `tasks.train` and `tasks.kinds`")
        self._tasks = tuple(tasks)
        self._seed = seed
        self.position = position

    def take(self, num: int) -> list[Task]:
        """Return the next tasks and move on."""
        drawn = [self._at(index) for index in range(self.position, self.position + num)]
        self.position += num
        return drawn

    def _at(self, index: int) -> Task:
        epoch, place = divmod(index, len(self._tasks))
        order = list(range(len(self._tasks)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return self._tasks[order[place]]
