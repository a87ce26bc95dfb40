"""What a run left behind, read for a report: as much as can be read, and what can't be is told."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from thundersyncrl.errors import ConfigError
from thundersyncrl.observe.bound import StepTime, step_time
from thundersyncrl.observe.event_file import read_events
from thundersyncrl.observe.events import Event
from thundersyncrl.observe.timeline import Window, windows
from thundersyncrl.runtime.run_folder import RunFolder

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One window of the run with its events."""

    time: StepTime
    events: tuple[Event, ...]

    @property
    def window(self) -> Window:
        return self.time.window


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as its files tell it."""

    stretches: tuple[Stretch, ...]
    """In order of time; the step during which a run broke off is one too."""
    metrics: tuple[Row, ...]
    transcripts: tuple[Row, ...]
    config: str
    """Text of the resolved config."""
    problems: tuple[str, ...]
    """What is missing or broken, for people."""


def read_run(folder: RunFolder) -> RunRecord:
    """Return what a run left.

    Raises:
        ConfigError: nothing of a run lies in the folder.
    """
    files = (folder.metrics, folder.events, folder.transcripts)
    if not any(path.exists() for path in files):
        raise ConfigError(
            f"expected a run folder with {', '.join(path.name for path in files)}, got none of them ({folder.path}); "
            "name the folder that `train` wrote"
        )
    metrics, broken_metrics = _read_rows(folder.metrics, ("event",))
    transcripts, broken_transcripts = _read_rows(folder.transcripts, ("step", "group", "member"))
    recorded = read_events(folder.events)
    return RunRecord(
        stretches=_stretches(recorded.events),
        metrics=metrics,
        transcripts=transcripts,
        config=folder.config.read_text(encoding="utf-8", errors="replace") if folder.config.exists() else "",
        problems=(*broken_metrics, *broken_transcripts, *recorded.problems),
    )


def _stretches(events: Sequence[Event]) -> tuple[Stretch, ...]:
    marked = windows(events)
    marked = sorted([*marked, *_unfinished(events, marked)], key=lambda window: window.start_s)
    starts = [window.start_s for window in marked]
    parts: list[list[Event]] = [[] for _ in marked]
    for event in events:
        at = max(0, bisect.bisect_right(starts, event.start_s) - 1)
        while at < len(marked) and marked[at].start_s < event.end_s:
            if event.start_s < marked[at].end_s:
                parts[at].append(event)
            at += 1
    return tuple(
        Stretch(time=step_time(part, window), events=tuple(part)) for window, part in zip(marked, parts, strict=True)
    )


def _unfinished(events: Sequence[Event], marked: Sequence[Window]) -> list[Window]:
    """Return a window for what came after the last mark, in a step that never ended."""
    last_s = max((window.end_s for window in marked), default=float("-inf"))
    rest = [e for e in events if e.start_s >= last_s and e.actor in ("controller", "sandbox") and e.trajectory]
    if not rest:
        return []
    step = max(e.step for e in rest)
    end_s = max(e.end_s for e in events)
    start_s = min(e.start_s for e in rest)
    return [Window(name=f"step {step}, unfinished", step=step, start_s=start_s, end_s=end_s)] if end_s > start_s else []


def _read_rows(path: Path, needed: Sequence[str]) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    if not path.exists():
        return (), (f"{path.name} is missing.",)
    rows, num_broken = list[Row](), 0
    for line in path.read_bytes().split(b"\n"):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and all(key in row for key in needed):
            rows.append(cast(Row, row))
        else:
            num_broken += 1
    return tuple(rows), (f"{num_broken} lines of {path.name} are broken and left out.",) if num_broken else ()
