"""How well a step overlapped: the learner's work that hid, the least that the step could have taken, work for nothing.

    bound = max(engine work, learner work, longest critical path)

A trajectory's critical path is its own: opening, sampling and tools without queueing, then the longer of its verifier
and its own gradient, then optimizer and publish. Where both share one core, their work can't overlap, so it adds up.
All of it is measured, not guessed: a decode step that was slow because others decoded too counts as it was.
Where rollouts run ahead, a trajectory's path isn't in one step, so the bound is that of the work alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thundersyncrl.observe.events import Event
from thundersyncrl.observe.intervals import Interval, clip, overlap_seconds, seconds, union
from thundersyncrl.observe.timeline import (
    SETTLING,
    ActorTime,
    Segment,
    Window,
    actor_times,
    inside,
    segments,
    text_ends,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What one window's time went into."""

    window: Window
    actors: Mapping[str, ActorTime]
    segments: tuple[Segment, ...]
    gradient_s: float
    """Learner work but for the optimizer."""
    hidden_s: float
    """The part of it during which the engine or a sandbox (a tool, a verifier) worked too."""
    tail_s: float
    """The part of it that came after the last text was complete."""
    wasted_s: float
    """The part of it that went into groups whose rewards turned out all equal."""
    critical_s: float
    """Longest critical path of a trajectory; 0 where rollouts run ahead."""
    critical: str
    """That trajectory; empty without any."""
    bound_s: float
    """Least wall time for the same work; 0 without any."""

    @property
    def overlap(self) -> float:
        """Share of the gradient work that was hidden, 0 to 1; 0 without any."""
        return self.hidden_s / self.gradient_s if self.gradient_s > 0 else 0.0

    @property
    def above_bound(self) -> float:
        """How far above the bound the step took, as a share of it; 0 without a bound."""
        return self.window.seconds / self.bound_s - 1.0 if self.bound_s > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """Return what a step reports of it."""
        found = {f"idle_{actor}_s": time.total_idle_s for actor, time in self.actors.items()}
        for actor in ("engine", "learner"):
            for cause, idle_s in self.actors[actor].idle_s.items():
                found[f"idle_{actor}_{cause.replace(' ', '_').replace('-', '_')}_s"] = idle_s
        found |= {"bound_s": self.bound_s, "learner_tail_work_s": self.tail_s}
        if not self.window.runs_ahead:
            found |= {"critical_path_s": self.critical_s, "wasted_work_s": self.wasted_s}
        if self.gradient_s > 0:
            found["overlap"] = self.overlap
        if self.bound_s > 0:
            found["above_bound"] = self.above_bound
        return found


def step_time(events: Sequence[Event], window: Window) -> StepTime:
    """Return what the window's time went into."""
    within = inside(events, window)
    pieces = segments(within, window)
    actors = actor_times(pieces)
    gradient = _on(within, window, "learner")
    others = union([*_on(within, window, "engine"), *_on(within, window, "sandbox")])
    ends = text_ends(e for e in within if e.step == window.step or not window.runs_ahead)
    last_text_s = max(ends.values(), default=window.start_s)
    own = own_gradients(within)
    critical_s, critical = 0.0, ""
    if not window.runs_ahead:
        critical_s, critical = _critical_path(within, own, _settle_seconds(within, window))
    engine_s, learner_s = seconds(_on(within, window, "engine")), actors["learner"].busy_s
    work = [engine_s + learner_s] if window.shares_core else [engine_s, learner_s]
    return StepTime(
        window=window,
        actors=actors,
        segments=tuple(pieces),
        gradient_s=seconds(gradient),
        hidden_s=overlap_seconds(gradient, others),
        tail_s=seconds(clip(gradient, last_text_s, window.end_s)) if ends or window.runs_ahead else 0.0,
        wasted_s=sum(own.get(member, 0.0) for member in uniform_members(within)),
        critical_s=critical_s,
        critical=critical,
        bound_s=min(window.seconds, max(*work, critical_s)),
    )


def own_gradients(events: Sequence[Event]) -> dict[str, float]:
    """Return the seconds of learner work of each trajectory: its share of each pack, by tokens.

    A pack is logged once per trajectory, with the same times.
    """
    packs: dict[Interval, list[Event]] = defaultdict(list)
    for event in events:
        if event.actor == "learner" and event.trajectory:
            packs[event.start_s, event.end_s].append(event)
    own: dict[str, float] = defaultdict(float)
    for (start_s, end_s), members in packs.items():
        tokens = sum(member.tokens for member in members)
        for member in members:
            share = member.tokens / tokens if tokens else 1 / len(members)
            own[member.trajectory] += share * (end_s - start_s)
    return dict(own)


def uniform_members(events: Sequence[Event]) -> set[str]:
    """Return the trajectories of groups whose rewards are all in, at least two, and equal."""
    rewards: dict[str, dict[str, str]] = defaultdict(dict)
    for event in events:
        if event.what == "verifier" and event.detail:
            rewards[_group_of(event.trajectory)][event.trajectory] = event.detail
    same = [of for of in rewards.values() if len(of) > 1 and len(set(of.values())) == 1]
    return {member for of in same for member in of}


def _group_of(trajectory: str) -> str:
    return trajectory.rpartition("/member=")[0]


def _on(events: Sequence[Event], window: Window, actor: str) -> list[Interval]:
    """Return when an actor was at work, settling and clearing up apart."""
    chosen = (
        (e.start_s, e.end_s)
        for e in events
        if e.actor == actor and (e.actor, e.what) not in SETTLING and e.what != "environment close"
    )
    return union(clip(chosen, window.start_s, window.end_s))


def _settle_seconds(events: Sequence[Event], window: Window) -> float:
    settling = ((e.start_s, e.end_s) for e in events if (e.actor, e.what) in SETTLING)
    return seconds(union(clip(settling, window.start_s, window.end_s)))


def _critical_path(events: Sequence[Event], own: Mapping[str, float], settle_s: float) -> tuple[float, str]:
    text: dict[str, float] = defaultdict(float)
    verdict: dict[str, float] = defaultdict(float)
    for event in events:
        if event.what == "trajectory":
            text[event.trajectory] += event.seconds
        elif event.what == "queue":
            text[event.trajectory] -= event.seconds
        elif event.what == "verifier":
            verdict[event.trajectory] += event.seconds
    paths = {t: s + max(verdict.get(t, 0.0), own.get(t, 0.0)) + settle_s for t, s in text.items()}
    longest = max(paths, key=lambda t: (paths[t], t), default="")
    return paths.get(longest, 0.0), longest
