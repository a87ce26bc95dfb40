"""Trajectories that a config's own model sampled on its own tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from thundersyncrl.config import Config
from thundersyncrl.errors import ConfigError
from thundersyncrl.observe.observer import EvaluationResult
from thundersyncrl.records import Outcome, Status, StepReport, Task, Trajectory, TrajectoryId, Turn


class ProgressLines:
    """An observer that passes on phases as lines."""

    def __init__(self, progress: Callable[[str], None]):
        self._progress = progress

    def phase(self, name: str, detail: str = "") -> None:
        self._progress(f"{name}: {detail}" if detail else name)

    def progress(self, what: str, done: int, total: int) -> None: ...

    def step(self, report: StepReport) -> None: ...

    def sample(self, trajectory: Trajectory, reward: float | None) -> None: ...

    def evaluation(self, name: str, result: EvaluationResult) -> None: ...

    def close(self) -> None: ...


def sample_groups(
    config: Config, folder: Path, *, num_groups: int, group_size: int, progress: Callable[[str], None]
) -> tuple[Trajectory, ...]:
    """Return groups of trajectories as the run itself would sample them; failed ones are among them, as failures.

    At most two turns of 32 tokens: what has to be exact is in them, and float64 is slow on a real model.

    Args:
        config: the run's.
        folder: scratch space.
        num_groups: tasks.
        group_size: trajectories of each.
        progress: hears what is going on.

    Raises:
        ConfigError: nothing came that has a gradient.
    """
    from thundersyncrl.runs import rollout_run

    short = {
        "group_size": group_size,
        "max_turns": min(config.rollout.max_turns, 2),
        "max_turn_tokens": min(config.rollout.max_turn_tokens, 32),
    }
    update = {
        "run": str(folder),
        "rollout": config.rollout.model_copy(update=short),
        "tasks": config.tasks.model_copy(update={"num_train": 2 * num_groups, "num_heldout": 1}),
    }
    output = folder / "trajectories.jsonl"
    rollout_run(config.model_copy(update=update), num=num_groups, output=output, observer=ProgressLines(progress))
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    trajectories = tuple(
        trajectory_of_row(row, TrajectoryId(0, index // group_size, index % group_size))
        for index, row in enumerate(rows)
    )
    if not any(t.outcome.is_usable and t.num_action_tokens for t in trajectories):
        reasons = sorted({t.outcome.reason for t in trajectories})
        raise ConfigError(
            f"expected trajectories to certify, all {len(trajectories)} failed ({'; '.join(reasons)}); "
            "try `thundersyncrl rollout` with this config"
        )
    return trajectories


def trajectory_of_row(row: Mapping[str, Any], id: TrajectoryId) -> Trajectory:
    """Return the trajectory that a line of a rollout file holds.

    Example:
        >>> row = {"token_ids": [5, 6, 7, 8], "action_mask": [0, 1, 0, 1], "behavior_logprobs": [-1.0, -2.0],
        ...        "task": "t", "version": 0, "outcome": "completed"}
        >>> [(turn.observation_ids, turn.action_ids) for turn in trajectory_of_row(row, TrajectoryId(0, 0, 0)).turns]
        [((5,), (6,)), ((7,), (8,))]
    """
    tokens, mask = cast(Sequence[int], row["token_ids"]), cast(Sequence[int], row["action_mask"])
    runs = [[tokens[i] for i in run] for _, run in groupby(range(len(tokens)), key=lambda i: mask[i])]
    if runs and mask[0]:
        runs.insert(0, [])
    if len(runs) % 2:
        runs.append([])
    turns: list[Turn] = []
    logprobs = list(cast(Sequence[float], row["behavior_logprobs"]))
    for observed, acted in zip(runs[::2], runs[1::2], strict=True):
        own, logprobs = logprobs[: len(acted)], logprobs[len(acted) :]
        turns.append(
            Turn(
                observation_ids=tuple(observed),
                action_ids=tuple(acted),
                behavior_logprobs=tuple(own),
                version=0,
            )
        )
    outcome = Outcome(status=Status(row["outcome"]), reason=str(row.get("reason", "")))
    return Trajectory(id=id, task=Task(id=str(row["task"]), instruction=""), turns=tuple(turns), outcome=outcome)
