"""The events of a run in a file, one JSON object a line: kept in memory while a step runs, written when it ends.

Lines hold the fields of `Event` that aren't empty. Each process that writes begins with a line
`{"what": "clock", "monotonic_s": ..., "unix_s": ...}`, because the monotonic clock means nothing after a restart.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from thundersyncrl.observe.events import Event, EventBuffer
from thundersyncrl.runtime.json_lines import append_lines

JOIN_GAP_S = 0.0005
"""Slices of one actor that follow each other this closely are one event in the file ..."""
JOIN_S = 0.25
"""... as long as that lasts no longer than this, so that a file holds seconds, not slices."""


class EventWriter(EventBuffer):
    """Implements `EventLog` with a file that it appends to at each flush.

    Args:
        path: the file; what is in it stays.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._has_clock = False

    def flush(self, step: int) -> tuple[Event, ...]:
        """Append what came since the last flush, and return it.

        Raises:
            NumericsError: a time that isn't finite.
        """
        taken = super().flush(step)
        rows = [_row(event) for event in joined(taken)]
        if not self._has_clock:
            rows.insert(0, {"what": "clock", "monotonic_s": time.monotonic(), "unix_s": time.time(), "step": step})
            self._has_clock = True
        append_lines(self._path, rows)
        return taken


def joined(events: Iterable[Event]) -> list[Event]:
    """Return the events in order of their start, runs of short slices of one kind as one event.

    Example:
        >>> slices = [Event(actor="engine", what="decode", start_s=t, end_s=t + 0.01, tokens=4) for t in (0.0, 0.01)]
        >>> [(event.start_s, event.end_s, event.tokens) for event in joined(slices)]
        [(0.0, 0.02, 8)]
    """
    kept: list[Event] = []
    last: dict[tuple[str, str, int, str], int] = {}
    for event in sorted(events, key=lambda e: (e.start_s, e.end_s)):
        key = (event.actor, event.what, event.step, event.detail)
        if event.trajectory or event.actor == "controller":
            kept.append(event)
            continue
        before = kept[last[key]] if key in last else None
        if (
            before is not None
            and 0 <= event.start_s - before.end_s <= JOIN_GAP_S
            and event.end_s - before.start_s <= JOIN_S
        ):
            kept[last[key]] = replace(before, end_s=event.end_s, tokens=before.tokens + event.tokens)
        else:
            last[key] = len(kept)
            kept.append(event)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a file of events held.

    Times are seconds since the first event; a run that went on later goes on later here too.
    """

    events: tuple[Event, ...]
    started_unix_s: float
    """Of the first event; 0 without events."""
    problems: tuple[str, ...]
    """What couldn't be read, for people."""


def read_events(path: Path) -> Recorded:
    """Return what a file of events tells, and what of it is missing or broken; never raises for its content."""
    if not path.exists():
        return Recorded(events=(), started_unix_s=0.0, problems=(f"{path.name} is missing: no timeline.",))
    offset, events, num_broken = 0.0, list[Event](), 0
    for line in path.read_bytes().split(b"\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if row.get("what") == "clock":
                offset = float(row["unix_s"]) - float(row["monotonic_s"])
            else:
                events.append(_event(row, offset))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            num_broken += 1
    events.sort(key=lambda e: (e.start_s, e.end_s))
    problems = (f"{num_broken} lines of {path.name} are broken and left out.",) if num_broken else ()
    if not events:
        return Recorded(events=(), started_unix_s=0.0, problems=(*problems, f"{path.name} holds no events."))
    zero = events[0].start_s
    shifted = tuple(replace(e, start_s=e.start_s - zero, end_s=e.end_s - zero) for e in events)
    return Recorded(events=shifted, started_unix_s=zero, problems=problems)


def _row(event: Event) -> dict[str, Any]:
    row: dict[str, Any] = {
        "actor": event.actor,
        "what": event.what,
        "start_s": round(event.start_s, 6),
        "end_s": round(event.end_s, 6),
        "step": event.step,
    }
    if event.trajectory:
        row["trajectory"] = event.trajectory
    if event.tokens:
        row["tokens"] = event.tokens
    if event.detail:
        row["detail"] = event.detail
    return row


def _event(row: Any, offset: float) -> Event:
    fields = cast(Mapping[str, Any], row)
    start_s, end_s = float(fields["start_s"]) + offset, float(fields["end_s"]) + offset
    if not 0 <= end_s - start_s < float("inf"):
        raise ValueError("an event that ends before it starts, or never")
    return Event(
        actor=str(fields["actor"]),
        what=str(fields["what"]),
        start_s=start_s,
        end_s=end_s,
        step=int(fields.get("step", -1)),
        trajectory=str(fields.get("trajectory", "")),
        tokens=int(fields.get("tokens", 0)),
        detail=str(fields.get("detail", "")),
    )
