"""The metrics file: one JSON object a line, for steps, evaluations and phases.

| `event` | keys |
| --- | --- |
| `step` | `step`, `version`, the counts of the report, `failures`, and its metrics by name |
| `evaluation` | `name`, `step` (the next step to run), and the fields of the result |
| `phase` | `name`, `detail`, `step` (the next step to run) |

Every line has `elapsed_s`, the seconds since this process began to observe.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from thundersyncrl.errors import ContractError
from thundersyncrl.observe.observer import EvaluationResult
from thundersyncrl.records import StepReport, Trajectory
from thundersyncrl.runtime.json_lines import append_line, read_lines


class MetricsFile:
    """Writes the metrics of a run to a file as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started_s = time.monotonic()

    def phase(self, name: str, detail: str = "") -> None:
        self._write({"event": "phase", "step": self._next_step(), "name": name, "detail": detail})

    def progress(self, what: str, done: int, total: int) -> None:
        """Progress is for people who watch; nothing is written."""

    def step(self, report: StepReport) -> None:
        """Write one step.

        Raises:
            ContractError: a metric has the name of one of the report's own fields.
            NumericsError: a metric isn't finite.
        """
        own: dict[str, Any] = {
            "event": "step",
            "step": report.step,
            "version": report.version,
            "num_launched": report.num_launched,
            "num_trained": report.num_trained,
            "num_dropped": report.num_dropped,
            "num_failed": report.num_failed,
            "failures": dict(report.failures),
            "level": report.level,
        }
        taken = sorted((own.keys() | {"elapsed_s"}) & report.metrics.keys())
        if taken:
            raise ContractError(f"expected metrics with names of their own, got {', '.join(taken)}; rename them")
        self._write(own | dict(report.metrics))

    def sample(self, trajectory: Trajectory, reward: float | None) -> None:
        """Trajectories have a file of their own; nothing is written."""

    def evaluation(self, name: str, result: EvaluationResult) -> None:
        self._write(
            {
                "event": "evaluation",
                "name": name,
                "step": self._next_step(),
                "pass_rate": result.pass_rate,
                "several_turns_pass_rate": result.several_turns_pass_rate,
                "by_kind": dict(result.by_kind),
                "num": result.num,
                "num_failed": result.num_failed,
                "seconds": result.seconds,
            }
        )

    def close(self) -> None:
        """Every line is on disk already."""

    def _next_step(self) -> int:
        # From the file, not from memory: a resumed run goes on from what is left in it.
        rows = read_lines(self._path) if self._path.exists() else []
        return max((row["step"] + 1 for row in rows if row["event"] == "step"), default=0)

    def _write(self, row: dict[str, Any]) -> None:
        append_line(self._path, row | {"elapsed_s": round(time.monotonic() - self._started_s, 3)})
