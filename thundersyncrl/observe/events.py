"""What happened when: the event that every actor emits, and the log that takes it.

This module imports nothing of the package, so that whoever works may emit.

| `actor` | `what` | from ... to | `tokens` | `detail` |
| --- | --- | --- | --- | --- |
| controller | `start-up` | the run's start, the first version live | | |
| controller | `placement` | a point in time | | "inline", "elastic" or "split" |
| controller | `step` | the step's first act, its publish confirmed | | "shared core", or "asynchronous" and how far |
| controller | `settle` | the rollouts' end, the learner's metrics | | |
| controller | `publish` | asking the engine, its receipt | | |
| controller | `evaluation`, `warm start` | its begin, its end | | name of the evaluation |
| controller | `trajectory` | opening the world, the text complete | of its actions | status, and cause |
| controller | `sample` | asking for a turn, having it | sampled | |
| controller | `queue` | a request's arrival in the engine, its place in the batch | | |
| engine | `decode`, `prefill`, `decode and prefill` | one slice | computed | |
| engine | `publish` | forgetting keys and values, weights live | | |
| learner | `pack` | one forward and backward, once per trajectory | of the trajectory | class of the work |
| learner | `work` | a slice that says no more of itself | | |
| learner | `optimizer` | settle, the weights changed | | level of the step's work, and why |
| learner | `supervised step` | one step of the warm start | | |
| sandbox | `environment open`, `environment close` | its begin, its end | | |
| sandbox | `tool` | an action, its observation | | |
| sandbox | `verifier` | asking for a verdict, having it | | the reward |
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that one actor did, between two readings of `time.monotonic`, the machine's one clock.

    Example:
        >>> event = Event(actor="engine", what="decode", start_s=1.0, end_s=1.5, tokens=8)
        >>> event.seconds
        0.5
    """

    actor: str
    what: str
    start_s: float
    end_s: float
    step: int = -1
    """-1 where the actor doesn't know; the log then fills in the step that runs."""
    trajectory: str = ""
    """Its id as text; empty for what belongs to no single one."""
    tokens: int = 0
    detail: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class EventLog(Protocol):
    """Takes events. `add` and `extend` may be called from any thread, cost next to nothing and never block."""

    def add(self, event: Event) -> None:
        """Take one event."""
        ...

    def extend(self, events: Iterable[Event]) -> None:
        """Take a batch, such as another process sends."""
        ...

    def flush(self, step: int) -> tuple[Event, ...]:
        """Make safe, and return, what came since the last flush; it belongs to `step` where it doesn't say itself."""
        ...


class NoEvents:
    """The log of a run that isn't observed.

    Example:
        >>> NoEvents().flush(0)
        ()
    """

    def add(self, event: Event) -> None:
        """Nothing is kept."""

    def extend(self, events: Iterable[Event]) -> None:
        """Nothing is kept."""

    def flush(self, step: int) -> tuple[Event, ...]:
        return ()


class EventBuffer:
    """A log in memory: for a process that sends its events elsewhere, and for measurements without a run folder.

    Example:
        >>> buffer = EventBuffer()
        >>> buffer.add(Event(actor="engine", what="decode", start_s=0.0, end_s=1.0))
        >>> [event.step for event in buffer.flush(3)], buffer.flush(3)
        ([3], ())
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()

    def add(self, event: Event) -> None:
        self._events.append(event)

    def extend(self, events: Iterable[Event]) -> None:
        self._events.extend(events)

    def flush(self, step: int) -> tuple[Event, ...]:
        taken: list[Event] = []
        while self._events:  # not swapped: another thread may be adding to this very deque
            event = self._events.popleft()
            taken.append(event if event.step >= 0 else replace(event, step=step))
        return tuple(taken)


def record(
    log: EventLog,
    start_s: float,
    actor: str,
    what: str,
    *,
    step: int = -1,
    trajectory: str = "",
    tokens: int = 0,
    detail: str = "",
) -> None:
    """Log what began at `start_s` (of `time.monotonic`) and ends now."""
    log.add(
        Event(
            actor=actor,
            what=what,
            start_s=start_s,
            end_s=time.monotonic(),
            step=step,
            trajectory=trajectory,
            tokens=tokens,
            detail=detail,
        )
    )
