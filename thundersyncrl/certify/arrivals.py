"""Arrival orders: when turns, texts, rewards, losses and the seal come, and how much work runs in between."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass

from thundersyncrl.certify.cases import Batch
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.objective import WorkLimits
from thundersyncrl.records import TrajectoryId, Turn


class What(enum.StrEnum):
    """What happens in an event."""

    TURN = "turn"
    TEXT = "text"
    REWARD = "reward"
    LOSS = "loss"
    SEAL = "seal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One arrival, and how many packs the learner may run before the next."""

    what: What
    member: TrajectoryId | None = None
    """None for the seal."""
    num_packs: int
    turns: tuple[Turn, ...] = ()
    """All that have finished so far, for a turn."""


_Pace = Callable[[random.Random, What], int]
_STYLES: tuple[tuple[str, _Pace], ...] = (
    # work on a text before its reward: class content
    ("texts first", lambda draw, what: 2 if what in (What.TURN, What.TEXT) else draw.randrange(2)),
    # reward right behind its text, then work: class known
    ("pairs", lambda draw, what: 0 if what is What.TEXT else 2),
    # nothing until all is in: class final
    ("lazy", lambda draw, what: 0),
    ("mixed", lambda draw, what: draw.randrange(3)),
)


def arrivals(batch: Batch, seed: int) -> list[Event]:
    """Return one random arrival order of a batch; four styles take turns, so that every class of work occurs.

    Each reward comes after its text and in an order of its own; a lost member is lost before or after its text. The
    turns of a trajectory come one at a time among the other events, now and then after a first attempt with other
    tokens; below level "turn" the learner leaves them alone.
    """
    draw = random.Random(seed)
    style, pace = _STYLES[seed % len(_STYLES)]
    ids = [t.id for t in batch.trajectories]
    draw.shuffle(ids)
    ends = list(ids)
    if style != "pairs":
        draw.shuffle(ends)
    place = {id: index for index, id in enumerate(ids)}
    after = {id: len(ids) if style == "texts first" else place[id] + draw.random() * len(ids) for id in ids}
    if style == "pairs":
        after = {id: place[id] + 0.5 for id in ids}
    timed: list[tuple[float, What, TrajectoryId | None]] = [(draw.random() * 2 * len(ids), What.SEAL, None)]
    for rank, id in enumerate(ends):
        is_lost = id in batch.lost
        if not (is_lost and draw.random() < 0.5):
            timed.append((place[id], What.TEXT, id))
        # the rank breaks ties in an order that isn't the texts'
        timed.append((after[id] + rank * 1e-3, What.LOSS if is_lost else What.REWARD, id))
    timed.sort(key=lambda entry: entry[0])
    events = [Event(what=what, member=id, num_packs=pace(draw, what)) for _, what, id in timed]
    return _with_turns(events, batch, random.Random(seed), lambda draw: pace(draw, What.TURN))


def _with_turns(
    events: list[Event], batch: Batch, draw: random.Random, pace: Callable[[random.Random], int]
) -> list[Event]:
    """Return the events with each text's turns somewhere before it, in order."""
    turns = {t.id: t.turns for t in batch.trajectories}
    merged: list[tuple[float, Event]] = []
    for place, event in enumerate(events):
        merged.append((place, event))
        if event.what is not What.TEXT or event.member is None:
            continue
        own = turns[event.member]
        attempts = [own]
        if draw.random() < 0.3:  # a retried trajectory: what it said before is a sibling's
            siblings = [t.turns for t in batch.groups[event.member.group_id] if t.id != event.member]
            attempts.insert(0, draw.choice(siblings))
        known = [attempt[: k + 1] for attempt in attempts for k in range(len(attempt)) if draw.random() < 0.8]
        for at, so_far in zip(sorted(draw.uniform(-1, place) for _ in known), known, strict=True):
            merged.append((at, Event(what=What.TURN, member=event.member, num_packs=pace(draw), turns=so_far)))
    merged.sort(key=lambda entry: entry[0])
    return [event for _, event in merged]


def play(learner: Learner, batch: Batch, events: list[Event]) -> dict[str, float]:
    """Run one step of the learner under these arrivals, and return its metrics."""
    texts = {t.id: t for t in batch.trajectories}
    learner.begin_step()
    for group, members in batch.groups.items():
        learner.open_group(group, [t.id for t in members])
    for event in events:
        if event.member is None:
            learner.seal()
        elif event.what is What.TURN:
            learner.turn(event.member, event.turns)
        elif event.what is What.TEXT:
            learner.text(texts[event.member])
        elif event.what is What.REWARD:
            learner.reward(event.member, batch.rewards[event.member])
        else:
            learner.lose(event.member)
        for _ in range(event.num_packs):
            if learner.has_work:
                learner.run_once()
    while learner.has_work:
        learner.run_once()
    return learner.finish_step()


def limits_of_order(seed: int, *, stream: str) -> WorkLimits:
    """Return how work is cut in this order: packs, kept prompt graphs and open groups take turns at being scarce."""
    return WorkLimits(
        stream=stream,
        pack_tokens=(2048, 24, 2048, 9)[seed // 4 % 4],
        graph_tokens=(4096, 6, 0)[seed % 3],
        early_tokens=(1, 5)[seed % 2],
        max_open_groups=(64, 64, 64, 64, 1)[seed % 5],
        compare_behavior=False,
    )
