"""Where each second of a step went: every actor busy, or idle for exactly one cause. Pure maths on events.

The step is cut at every start and end of an event. In each piece nothing changes, so it gets, for each actor, one
label: busy, or the first cause of its list that holds. Hence busy and idle by cause add up to wall time.

| cause | the engine waits because | the learner waits because |
| --- | --- | --- |
| optimizer and publish | nobody may sample then | the new version goes live |
| shared core | the learner has the core, inline | the engine has the core, inline |
| start-up | environments open | environments open |
| prefill of the next step | | prompts are computed, no text is complete |
| first texts | | the first trajectories are being sampled |
| straggler | | some texts are complete, another is being sampled |
| tool | every live trajectory is in a tool | the same |
| verifier | only rewards are missing | only rewards are missing |
| sampling | | (sandbox only) actions are being sampled |
| learner | only gradients are missing | |
| hand-over | a request is on its way | a text is on its way |
| nothing to do | none of these | none of these |
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from thundersyncrl.observe.events import Event

ACTORS = ("engine", "learner", "sandbox")
SHARED_CORE = "shared core"
"""`detail` of a step's event where engine and learner take turns on one thread."""
ASYNCHRONOUS = "asynchronous"
"""How `detail` of a step's event begins where rollouts of later steps run meanwhile."""
SETTLING = {("learner", "optimizer"), ("controller", "publish"), ("engine", "publish")}


class Label(enum.StrEnum):
    """What an actor does: busy, or why it is idle."""

    BUSY = "busy"
    SETTLE = "optimizer and publish"
    SHARED = "shared core"
    START_UP = "start-up"
    PREFILL = "prefill of the next step"
    FIRST = "first texts"
    STRAGGLER = "straggler"
    TOOL = "tool"
    VERIFIER = "verifier"
    SAMPLING = "sampling"
    LEARNER = "learner"
    HAND_OVER = "hand-over"
    NOTHING = "nothing to do"


CAUSES = tuple(label for label in Label if label is not Label.BUSY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of the run with a name: a step, an evaluation, the warm start, the start-up."""

    name: str
    step: int
    """-1 outside of steps."""
    start_s: float
    end_s: float
    shares_core: bool = False
    runs_ahead: bool = False
    """Rollouts of later steps run in it too, and its own began before it."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def windows(events: Iterable[Event]) -> list[Window]:
    """Return the stretches that the controller marked, in order of their start."""
    found: list[Window] = []
    for event in events:
        if event.actor == "controller" and event.what in ("step", "evaluation", "warm start", "start-up"):
            is_step = event.what == "step"
            suffix = f" {event.step}" if is_step else f" {event.detail}" if event.detail else ""
            found.append(
                Window(
                    name=event.what + suffix,
                    step=event.step if is_step else -1,
                    start_s=event.start_s,
                    end_s=event.end_s,
                    shares_core=is_step and event.detail == SHARED_CORE,
                    runs_ahead=is_step and event.detail.startswith(ASYNCHRONOUS),
                )
            )
    return sorted(found, key=lambda window: window.start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of time in which one actor has one label."""

    actor: str
    label: Label
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorTime:
    """How an actor spent a window."""

    busy_s: float
    idle_s: Mapping[Label, float]
    """Seconds by cause; causes that never held are left out."""

    @property
    def total_idle_s(self) -> float:
        return math.fsum(self.idle_s.values())


@dataclass(slots=True)
class _State:
    """What holds in one piece: counts of open events."""

    engine: int = 0
    learner: int = 0
    sandbox: int = 0
    settling: int = 0
    prefill: int = 0
    opening: int = 0
    tools: int = 0
    verifiers: int = 0
    sampling: int = 0
    finishing: int = 0
    """The rollouts are over, and the learner is asked for its last work and its step."""
    pending: int = 0
    """Texts that are complete, will have their gradient taken, and haven't."""
    live: int = 0
    """Trajectories whose text isn't complete, those that are yet to begin included."""
    complete: int = 0
    """Texts that are complete."""


def segments(events: Sequence[Event], window: Window) -> list[Segment]:
    """Return for each of `ACTORS` its labels over the window, without gaps or overlaps."""
    changes = [
        (min(max(at_s, window.start_s), window.end_s), name, by)
        for at_s, name, by in _changes(events, window)
        if at_s < window.end_s
    ]
    changes.sort(key=lambda change: change[0])
    state, now = _State(), window.start_s
    since_s, labels = dict[str, float](), dict[str, Label]()
    done: list[Segment] = []

    def begin_piece() -> None:
        for actor in ACTORS:
            label, before = _label(actor, state, shares_core=window.shares_core), labels.get(actor)
            if label is not before:
                if before is not None:
                    done.append(Segment(actor=actor, label=before, start_s=since_s[actor], end_s=now))
                since_s[actor], labels[actor] = now, label

    for at_s, name, by in changes:
        if at_s > now:
            begin_piece()
            now = at_s
        setattr(state, name, getattr(state, name) + by)
    if window.end_s > now:
        begin_piece()
    for actor, label in labels.items():
        done.append(Segment(actor=actor, label=label, start_s=since_s[actor], end_s=window.end_s))
    return sorted(done, key=lambda segment: (segment.start_s, segment.actor))


def actor_times(pieces: Iterable[Segment]) -> dict[str, ActorTime]:
    """Return the seconds of each actor by label; for each they add up to the window's."""
    parts: dict[str, dict[Label, list[float]]] = {actor: {} for actor in ACTORS}
    for piece in pieces:
        parts[piece.actor].setdefault(piece.label, []).append(piece.end_s - piece.start_s)
    sums = {actor: {label: math.fsum(values) for label, values in of.items()} for actor, of in parts.items()}
    return {
        actor: ActorTime(
            busy_s=of.get(Label.BUSY, 0.0),
            idle_s={cause: of[cause] for cause in CAUSES if cause in of},
        )
        for actor, of in sums.items()
    }


def text_ends(events: Iterable[Event]) -> dict[str, float]:
    """Return when each trajectory's text was complete; of several tries the last counts."""
    ends: dict[str, float] = {}
    for event in events:
        if event.what == "trajectory":
            ends[event.trajectory] = max(event.end_s, ends.get(event.trajectory, -math.inf))
    return ends


def inside(events: Iterable[Event], window: Window) -> list[Event]:
    """Return the events that lie in the window at least in part."""
    return [e for e in events if e.start_s < window.end_s and e.end_s > window.start_s]


def _changes(events: Sequence[Event], window: Window) -> list[tuple[float, str, int]]:
    within = inside(events, window)
    changes: list[tuple[float, str, int]] = []
    for event in within:
        for name in _counts(event):
            changes += [(event.start_s, name, 1), (event.end_s, name, -1)]
    complete = text_ends(within)
    for end_s in complete.values():
        changes += [(window.start_s, "live", 1), (end_s, "live", -1), (end_s, "complete", 1)]
    packed: dict[str, float] = {}
    for event in within:
        if event.actor == "learner" and event.start_s >= complete.get(event.trajectory, math.inf):
            packed[event.trajectory] = min(event.start_s, packed.get(event.trajectory, math.inf))
    for trajectory, start_s in packed.items():
        changes += [(complete[trajectory], "pending", 1), (start_s, "pending", -1)]
    return changes


def _counts(event: Event) -> list[str]:
    """Return the fields of the state that an event is counted in while it lasts."""
    if (event.actor, event.what) in SETTLING:
        return ["settling", "learner"] if event.actor == "learner" else ["settling"]
    if event.actor == "engine":
        return ["engine", "prefill"] if event.what == "prefill" else ["engine"]
    if event.actor == "learner":
        return ["learner"]
    if event.actor == "sandbox":
        waits = {"tool": "tools", "verifier": "verifiers", "environment open": "opening"}.get(event.what)
        return ["sandbox", waits] if waits else ["sandbox"]
    waits = {"sample": "sampling", "start-up": "opening", "settle": "finishing"}.get(event.what)
    return [waits] if waits else []


def _label(actor: str, state: _State, *, shares_core: bool) -> Label:
    if getattr(state, actor):
        return Label.BUSY
    if state.settling:
        return Label.SETTLE
    if actor == "engine":
        return _why_engine_idles(state, shares_core)
    return _why_learner_idles(state, shares_core) if actor == "learner" else _why_sandbox_idles(state)


def _why_engine_idles(state: _State, shares_core: bool) -> Label:
    if state.sampling:
        return Label.SHARED if shares_core and state.learner else Label.HAND_OVER
    if state.tools:
        return Label.TOOL
    if state.opening:
        return Label.START_UP
    if state.verifiers:
        return Label.VERIFIER
    return Label.LEARNER if state.learner or state.finishing else Label.NOTHING


def _why_learner_idles(state: _State, shares_core: bool) -> Label:
    if state.pending and shares_core and state.engine:
        return Label.SHARED
    if state.live and not state.complete:
        if state.opening and not (state.sampling or state.tools):
            return Label.START_UP
        if state.prefill:
            return Label.PREFILL
        return Label.TOOL if state.tools and not state.sampling else Label.FIRST
    if state.sampling:
        return Label.STRAGGLER
    if state.tools:
        return Label.TOOL
    if state.opening:
        return Label.START_UP
    if state.verifiers:
        return Label.VERIFIER
    return Label.HAND_OVER if state.pending or state.finishing else Label.NOTHING


def _why_sandbox_idles(state: _State) -> Label:
    if state.sampling or state.engine:
        return Label.SAMPLING
    if state.opening:
        return Label.START_UP
    return Label.LEARNER if state.learner else Label.NOTHING
