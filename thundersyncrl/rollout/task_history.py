"""How long trajectories of each task were so far: the longest expected start first, so that none of them ends last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thundersyncrl.records import Task, Trajectory


@dataclass(slots=True)
class _Totals:
    count: int = 0
    turns: int = 0
    tokens: int = 0
    tool_s: float = 0.0


@dataclass(slots=True)
class TaskHistory:
    """Turns, sampled tokens and tool seconds of each task's trajectories.

    Example:
        >>> tasks = [Task(id="a", instruction="short"), Task(id="b", instruction="long")]
        >>> TaskHistory().longest_first(tasks) == tasks
        True
    """

    by_task: dict[str, _Totals] = field(default_factory=dict[str, _Totals])
    num_tokens: int = 0
    sample_s: float = 0.0

    def add(self, trajectory: Trajectory) -> None:
        """Count a trajectory that was played."""
        totals, metrics = self.by_task.setdefault(trajectory.task.id, _Totals()), trajectory.metrics
        totals.count += 1
        totals.turns += len(trajectory.turns)
        totals.tokens += trajectory.num_action_tokens
        totals.tool_s += metrics.get("tool_s", 0.0)
        self.num_tokens += trajectory.num_action_tokens
        self.sample_s += metrics.get("sample_s", 0.0)

    def expected_turns(self, task: Task) -> float | None:
        """Return the mean number of turns, None for a task that wasn't played yet."""
        totals = self.by_task.get(task.id)
        return totals.turns / totals.count if totals else None

    def expected_s(self, task: Task) -> float | None:
        """Return tool time and sampling time, the latter at the mean speed of all tasks; None for a new task.

        A trajectory's own sampling time would tell how long it waited for a place, not how long it is.
        """
        totals = self.by_task.get(task.id)
        if totals is None:
            return None
        return (totals.tool_s + totals.tokens * self.sample_s / max(self.num_tokens, 1)) / totals.count

    def longest_first(self, tasks: Sequence[Task]) -> list[Task]:
        """Return tasks by falling expected time; new ones count as average, and equals keep their order."""
        known = {i: seconds for i, task in enumerate(tasks) if (seconds := self.expected_s(task)) is not None}
        average = sum(known.values()) / max(len(known), 1)
        order = sorted(range(len(tasks)), key=lambda i: -known.get(i, average))
        return [tasks[i] for i in order]
