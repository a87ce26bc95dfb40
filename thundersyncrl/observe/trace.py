"""A run as a trace in Chrome's trace event format, which Perfetto (https://ui.perfetto.dev) opens.

Engine, learner and controller have a track each; every trajectory has one with its environment, turns and verifier.
Source: "Trace Event Format", the JSON object form: complete events (`"ph": "X"`) in microseconds, names as metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from thundersyncrl.observe.events import Event
from thundersyncrl.observe.intervals import Interval

_ACTORS = ("controller", "engine", "learner")
_TRAJECTORIES = len(_ACTORS) + 1
"""Process number of the tracks of trajectories; the actors have 1, 2, 3."""


def trace(events: Iterable[Event]) -> dict[str, Any]:
    """Return the trace; every track's events nest or follow each other, as the format asks.

    Example:
        >>> found = trace([Event(actor="engine", what="decode", start_s=0.5, end_s=0.75, tokens=8)])
        >>> [(e["name"], e["ts"], e["dur"]) for e in found["traceEvents"] if e["ph"] == "X"]
        [('decode', 500000.0, 250000.0)]
    """
    known = list(events)
    lanes = _lanes(known)
    rows = [_name(pid, 0, "process_name", actor) for pid, actor in enumerate(_ACTORS, start=1)]
    rows.append(_name(_TRAJECTORIES, 0, "process_name", "trajectories"))
    rows += [_name(_TRAJECTORIES, tid, "thread_name", trajectory) for trajectory, tid in lanes.items()]
    packs: dict[tuple[str, Interval], list[Event]] = {}
    for event in known:
        if event.actor == "learner":
            packs.setdefault((event.what, (event.start_s, event.end_s)), []).append(event)
        elif event.trajectory:
            rows.append(_complete(event, _TRAJECTORIES, lanes[event.trajectory]))
        else:
            pid = _ACTORS.index(event.actor) + 1 if event.actor in _ACTORS else 1
            rows.append(_complete(event, pid, 0))
    rows += [_pack(members) for members in packs.values()]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _lanes(events: Iterable[Event]) -> dict[str, int]:
    found = dict.fromkeys(e.trajectory for e in events if e.trajectory and e.actor != "learner")
    return {trajectory: tid for tid, trajectory in enumerate(found, start=1)}


def _name(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(event: Event, pid: int, tid: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": event.step}
    if event.tokens:
        args["tokens"] = event.tokens
    if event.detail:
        args["detail"] = event.detail
    return {
        "name": event.what,
        "cat": event.actor,
        "ph": "X",
        "ts": round(event.start_s * 1e6, 1),
        "dur": round(event.seconds * 1e6, 1),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _pack(members: Sequence[Event]) -> dict[str, Any]:
    """Return a pack, which is logged once per trajectory, as one event."""
    row = _complete(members[0], _ACTORS.index("learner") + 1, 0)
    trajectories = [member.trajectory for member in members if member.trajectory]
    if trajectories:
        row["args"] |= {"tokens": sum(member.tokens for member in members), "trajectories": trajectories}
    return row
