"""The page and the trace of a run. The page is one file: its data as JSON, drawn by a script of its own.

Nothing of a run is trusted: text reaches the page as JSON in which `<`, `>` and `&` are escaped, and the script shows
it as text only.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from thundersyncrl.observe.events import Event
from thundersyncrl.observe.run_record import RunRecord, Stretch, read_run
from thundersyncrl.observe.timeline import ACTORS, CAUSES
from thundersyncrl.observe.trace import trace
from thundersyncrl.runtime.run_folder import RunFolder

__all__ = ["page_data", "read_run", "report_json", "write_report"]

MAX_TIMELINES = 40
"""Newest steps (and other stretches) whose every event is on the page; older ones have their idle bars."""
MAX_LANE_EVENTS = 20_000
"""Events of one timeline; a page that nobody can scroll shows nothing."""
MAX_ROWS = 20_000
"""Newest trajectories in the table."""
MAX_TRACE_EVENTS = 400_000
CURVES = (
    *("reward_mean", "pass_rate", "mismatch_max", "mismatch_mean", "action_tokens_mean", "turns_mean"),
    *("step_s", "bound_s", "overlap", "above_bound", "tokens_per_s", "idle_engine_s", "idle_learner_s"),
)


def write_report(folder: RunFolder, run: RunRecord) -> None:
    """Write the page and the trace into the run folder; a crash leaves the old ones or the new ones."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    page = environment.from_string(_asset("report.html")).render(
        title=folder.path.resolve().name,
        data=Markup(script_json(page_data(folder, run))),
        script=Markup(_asset("report.js")),
        style=Markup(_asset("report.css")),
    )
    _write(folder.report, page)
    _write(folder.trace, json.dumps(trace(_all_events(run)[-MAX_TRACE_EVENTS:]), allow_nan=False))


def script_json(data: Any) -> str:
    """Return JSON that can stand inside a script element, whatever text it holds.

    Example:
        >>> script_json({"task": "</script>"})
        '{"task":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no character; a browser may stop at it
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def page_data(folder: RunFolder, run: RunRecord) -> dict[str, Any]:
    """Return what the page shows, as JSON can hold it."""
    rows = trajectory_rows(run)
    shown = run.stretches[-MAX_TIMELINES:]
    notes = [*_label(run.config), *run.problems]
    if len(shown) < len(run.stretches):
        notes.append(f"Timelines of the newest {len(shown)} of {len(run.stretches)} stretches are on this page.")
    if len(rows) > MAX_ROWS:
        notes.append(f"The newest {MAX_ROWS} of {len(rows)} trajectories are in the table.")
    if len(_all_events(run)) > MAX_TRACE_EVENTS:
        notes.append(f"The newest {MAX_TRACE_EVENTS} events are in {folder.trace.name}.")
    stretches: list[dict[str, Any]] = []
    for number, stretch in enumerate(run.stretches):
        row = _stretch_row(stretch)
        if number >= len(run.stretches) - len(shown):
            row["lanes"], is_cut = _lanes(stretch)
            if is_cut:
                notes.append(f"{stretch.window.name}: the first {MAX_LANE_EVENTS} events are drawn.")
        stretches.append(row)
    return {
        "run": folder.path.resolve().name,
        "config": run.config,
        "notes": notes,
        "actors": list(ACTORS),
        "causes": [str(cause) for cause in CAUSES],
        "stretches": stretches,
        "steps": [_numbers(row, ("step", *CURVES)) for row in run.metrics if row["event"] == "step"],
        "evaluations": [
            {"name": str(row.get("name", "")), **_numbers(row, ("step", "pass_rate"))}
            for row in run.metrics
            if row["event"] == "evaluation"
        ],
        "trajectories": rows[-MAX_ROWS:],
    }


def _label(config: str) -> list[str]:
    """Return what must be said of a run whose rollouts may be stale."""
    try:
        found = tomllib.loads(config)
    except tomllib.TOMLDecodeError:
        return ["config.toml is broken."]
    sections = [found, *(value for value in found.values() if isinstance(value, dict))]
    steps = max((_number(section.get("max_staleness")) for section in sections), default=0)
    if not steps:
        return []
    return [f"Asynchronous run: rollouts may be up to {steps} steps older than the weights that they train."]


def report_json(folder: RunFolder, run: RunRecord) -> dict[str, Any]:
    """Return the figures of a report without its events, for machines."""
    steps = [stretch for stretch in run.stretches if stretch.window.step >= 0]
    return {
        "run": str(folder.path),
        "page": str(folder.report),
        "trace": str(folder.trace),
        "notes": [*_label(run.config), *run.problems],
        "num_trajectories": len(trajectory_rows(run)),
        "stretches": [_stretch_row(stretch) for stretch in run.stretches],
        "steps": {
            "num": len(steps),
            "seconds": math.fsum(s.window.seconds for s in steps),
            **{f"idle_{actor}_s": math.fsum(s.time.actors[actor].total_idle_s for s in steps) for actor in ACTORS},
            "gradient_s": math.fsum(s.time.gradient_s for s in steps),
            "hidden_s": math.fsum(s.time.hidden_s for s in steps),
            "bound_s": math.fsum(s.time.bound_s for s in steps),
        },
    }


def trajectory_rows(run: RunRecord) -> list[dict[str, Any]]:
    """Return a row for every launched trajectory of the steps; one without an end is "unfinished"."""
    rows = {_id_of(row): _transcript_row(row) for row in run.transcripts}
    for stretch in run.stretches:
        if stretch.window.step < 0:
            continue
        launched = dict.fromkeys(e.trajectory for e in stretch.events if e.trajectory and e.actor != "learner")
        for id in launched:
            if id not in rows:
                rows[id] = {"id": id, "step": stretch.window.step, "task": "", "kind": "", "outcome": "unfinished"}
                rows[id] |= {"reason": "", "reward": None, "turns": 0, "tokens": 0, "seconds": 0.0}
    return sorted(rows.values(), key=lambda row: row["step"])


def _id_of(row: Mapping[str, Any]) -> str:
    return f"step={row['step']}/group={row['group']}/member={row['member']}"


def _transcript_row(row: Mapping[str, Any]) -> dict[str, Any]:
    metrics = row.get("metrics")
    seconds = metrics.get("wall_s", 0.0) if isinstance(metrics, dict) else 0.0  # pyright: ignore[reportUnknownMemberType]
    cause = str(row.get("cause") or "")
    return {
        "id": _id_of(row),
        "step": _number(row["step"]),
        "task": str(row.get("task", "")),
        "kind": str(row.get("kind", "")),
        "outcome": str(row.get("status", "")) + (f" ({cause})" if cause else ""),
        "reason": str(row.get("reason", "")),
        "reward": _number(row.get("reward"), none=None),
        "turns": _number(row.get("num_turns")),
        "tokens": _number(row.get("num_action_tokens")),
        "seconds": round(_number(seconds), 3),
    }


def _stretch_row(stretch: Stretch) -> dict[str, Any]:
    time, window = stretch.time, stretch.window
    return {
        "name": window.name,
        "step": window.step,
        "start_s": round(window.start_s, 4),
        "seconds": round(window.seconds, 4),
        "actors": {
            actor: {
                "busy_s": round(of.busy_s, 4),
                "idle_s": {str(cause): round(idle, 4) for cause, idle in of.idle_s.items()},
            }
            for actor, of in time.actors.items()
        },
        "gradient_s": round(time.gradient_s, 4),
        "overlap": round(time.overlap, 4),
        "bound_s": round(time.bound_s, 4),
        "above_bound": round(time.above_bound, 4),
        "tail_s": round(time.tail_s, 4),
        "wasted_s": round(time.wasted_s, 4),
        "critical_s": round(time.critical_s, 4),
        "critical": time.critical,
    }


def _lanes(stretch: Stretch) -> tuple[list[dict[str, Any]], bool]:
    """Return the timeline: a lane per actor with its work and its idle causes, then one per trajectory."""
    start_s = stretch.window.start_s
    actors: dict[str, list[Any]] = {actor: [] for actor in ACTORS}
    members: dict[str, list[Any]] = {}
    for piece in stretch.time.segments:
        if piece.label != "busy":
            actors[piece.actor].append(_item(f"idle: {piece.label}", piece.start_s - start_s, piece.end_s - start_s))
        elif piece.actor == "sandbox":
            actors["sandbox"].append(_item("at work", piece.start_s - start_s, piece.end_s - start_s))
    for event in stretch.events[:MAX_LANE_EVENTS]:
        item = _item(event.what, event.start_s - start_s, event.end_s - start_s, event.tokens, event.detail)
        if event.actor in ("engine", "learner"):
            actors[event.actor].append(item)
        if event.trajectory:
            members.setdefault(event.trajectory, []).append(item)
    lanes = [{"label": actor, "is_actor": True, "items": items} for actor, items in actors.items()]
    ordered = sorted(members, key=_numbers_in)
    lanes += [{"label": id, "is_actor": False, "items": members[id]} for id in ordered]
    return lanes, len(stretch.events) > MAX_LANE_EVENTS


def _item(what: str, start_s: float, end_s: float, tokens: int = 0, detail: str = "") -> list[Any]:
    return [what, round(start_s, 5), round(end_s, 5), tokens, detail]


def _numbers_in(id: str) -> list[tuple[int, str]]:
    """Return a key that sorts member 10 after member 9."""
    parts = (part.rpartition("=")[2] for part in id.split("/"))
    return [(int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part) for part in parts]


def _numbers(row: Mapping[str, Any], keys: Iterable[str]) -> dict[str, float]:
    return {key: _number(row[key]) for key in keys if isinstance(row.get(key), (int, float))}


def _number(value: Any, none: Any = 0) -> Any:
    try:
        return value if isinstance(value, (int, float)) and math.isfinite(value) else none
    except OverflowError:  # an integer that no float can hold
        return none


def _asset(name: str) -> str:
    return resources.files("thundersyncrl.observe").joinpath("page", name).read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8", errors="replace")
    os.replace(part, path)


def _all_events(run: RunRecord) -> list[Event]:
    """Return the events of all stretches in order of their start, each once."""
    return sorted(dict.fromkeys(e for s in run.stretches for e in s.events), key=lambda e: e.start_s)
