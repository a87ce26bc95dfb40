"""Idle causes: they add up, each is found where it should be, and nothing else is told."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersyncrl.observe.bound import StepTime, own_gradients, step_time, uniform_members
from thundersyncrl.observe.events import Event
from thundersyncrl.observe.timeline import ACTORS, CAUSES, Label, Window, actor_times, segments, windows


def event(actor: str, what: str, start_s: float, end_s: float, trajectory: str = "", **more: Any) -> Event:
    return Event(actor=actor, what=what, start_s=start_s, end_s=end_s, trajectory=trajectory, **more)


def member(number: int, group: int = 0) -> str:
    return f"step=0/group={group}/member={number}"


def window(end_s: float, *, shares_core: bool = False) -> Window:
    return Window(name="step 0", step=0, start_s=0.0, end_s=end_s, shares_core=shares_core)


KINDS = (
    ("controller", "trajectory"),
    ("controller", "sample"),
    ("controller", "queue"),
    ("controller", "publish"),
    ("controller", "settle"),
    ("engine", "decode"),
    ("engine", "prefill"),
    ("engine", "publish"),
    ("learner", "pack"),
    ("learner", "optimizer"),
    ("learner", "something new"),
    ("sandbox", "tool"),
    ("sandbox", "verifier"),
    ("sandbox", "environment open"),
)
TIMES = st.one_of(st.integers(-2, 12).map(float), st.floats(-2.0, 12.0, allow_nan=False))


@st.composite
def any_events(draw: st.DrawFn) -> list[Event]:
    found: list[Event] = []
    for actor, what in draw(st.lists(st.sampled_from(KINDS), max_size=25)):
        start_s, end_s = sorted((draw(TIMES), draw(TIMES)))
        trajectory = draw(st.sampled_from(("", member(0), member(1), member(2, 1))))
        found.append(event(actor, what, start_s, end_s, trajectory, tokens=draw(st.integers(0, 9))))
    return found


@settings(max_examples=300, deadline=None)
@given(any_events(), st.booleans())
def test_busy_and_idle_by_cause_add_up_to_wall_time(events: list[Event], shares_core: bool) -> None:
    step = window(10.0, shares_core=shares_core)
    for time in actor_times(segments(events, step)).values():
        assert math.isclose(time.busy_s + time.total_idle_s, 10.0, rel_tol=1e-9)
        assert all(seconds > 0 for seconds in time.idle_s.values())


@settings(max_examples=300, deadline=None)
@given(any_events(), st.booleans(), st.randoms())
def test_pieces_tile_the_window_whatever_the_order_of_events(
    events: list[Event], shares_core: bool, random: Any
) -> None:
    step = window(10.0, shares_core=shares_core)
    pieces = segments(events, step)
    for actor in ACTORS:
        own = [piece for piece in pieces if piece.actor == actor]
        assert (own[0].start_s, own[-1].end_s) == (0.0, 10.0)
        assert all(a.end_s == b.start_s and a.label is not b.label for a, b in itertools.pairwise(own))
    shuffled = list(events)
    random.shuffle(shuffled)
    assert segments(shuffled, step) == pieces


@settings(max_examples=200, deadline=None)
@given(any_events(), st.booleans())
def test_busy_time_is_what_an_independent_count_on_a_grid_finds(events: list[Event], shares_core: bool) -> None:
    """On whole seconds a piece is a second, so membership can be counted without any sweep."""
    whole = [e for e in events if e.start_s == int(e.start_s) and e.end_s == int(e.end_s)]
    times = actor_times(segments(whole, window(10.0, shares_core=shares_core)))
    for actor in ("engine", "learner", "sandbox"):
        works = [e for e in whole if e.actor == actor and e.what != "publish"]
        busy = sum(any(e.start_s <= t and t + 1 <= e.end_s for e in works) for t in range(10))
        assert times[actor].busy_s == busy


@settings(max_examples=200, deadline=None)
@given(any_events(), st.booleans())
def test_a_step_is_never_shorter_than_its_bound_and_parts_never_exceed_wholes(
    events: list[Event], shares_core: bool
) -> None:
    time = step_time(events, window(10.0, shares_core=shares_core))
    assert 0.0 <= time.hidden_s <= time.gradient_s + 1e-9
    assert 0.0 <= time.tail_s <= time.gradient_s + 1e-9
    assert time.above_bound >= -1e-9
    assert all(math.isfinite(value) for value in time.metrics().values())


def step_of_two(shares_core: bool = False) -> StepTime:
    """Two trajectories: 0 ends its text at 4 and 1 at 8; every cause has its place."""
    first, second = member(0), member(1)
    events = [
        event("controller", "trajectory", 0, 4, first),
        event("controller", "trajectory", 0, 8, second),
        event("sandbox", "environment open", 0, 1, first),
        event("sandbox", "environment open", 0, 1, second),
        event("controller", "sample", 1, 3, first),
        event("controller", "sample", 1, 3, second),
        event("engine", "prefill", 1, 2),
        event("engine", "decode", 2, 3),
        event("sandbox", "tool", 3, 4, first),
        event("sandbox", "tool", 3, 6, second),
        event("learner", "pack", 4, 5, first, tokens=10, detail="content"),
        event("controller", "sample", 6, 8, second),
        event("engine", "decode", 6, 8),
        event("sandbox", "verifier", 4, 4.5, first, detail="1.0"),
        event("sandbox", "verifier", 8, 10, second, detail="0.0"),
        event("learner", "pack", 8, 9, second, tokens=30, detail="content"),
        event("learner", "optimizer", 10, 11),
        event("controller", "publish", 11, 12),
        event("engine", "publish", 11, 12),
    ]
    return step_time(events, window(12.5, shares_core=shares_core))


def test_every_cause_is_told_where_it_holds() -> None:
    time = step_of_two()
    assert time.actors["engine"].busy_s == 4
    assert dict(time.actors["engine"].idle_s) == {
        Label.SETTLE: 2,
        Label.START_UP: 1,
        Label.TOOL: 3,
        Label.VERIFIER: 2,
        Label.NOTHING: 0.5,
    }
    assert time.actors["learner"].busy_s == 3
    assert dict(time.actors["learner"].idle_s) == {
        Label.SETTLE: 1,
        Label.START_UP: 1,
        Label.PREFILL: 1,
        Label.FIRST: 1,
        Label.TOOL: 2,
        Label.STRAGGLER: 2,
        Label.VERIFIER: 1,
        Label.NOTHING: 0.5,
    }
    assert dict(time.actors["sandbox"].idle_s) == {Label.SETTLE: 2, Label.SAMPLING: 4, Label.NOTHING: 0.5}


def test_the_step_is_measured_against_its_bound() -> None:
    time = step_of_two()
    assert (time.gradient_s, time.hidden_s, time.tail_s, time.wasted_s) == (2, 2, 1, 0)
    assert time.overlap == 1.0, "the second gradient hid behind a verifier"
    # the second trajectory: 8 of text, then its verifier, which takes longer than its gradient, then 2 to settle
    assert (time.critical, time.critical_s, time.bound_s) == (member(1), 12, 12)
    assert time.above_bound == pytest.approx(12.5 / 12 - 1)
    assert time.metrics()["idle_engine_tool_s"] == 3
    assert time.metrics()["idle_learner_optimizer_and_publish_s"] == 1


def test_on_a_shared_core_work_adds_up_and_waiting_for_the_other_has_its_cause() -> None:
    first, second = member(0), member(1)
    events = [
        event("controller", "trajectory", 0, 2, first),
        event("controller", "trajectory", 0, 5, second),
        event("controller", "sample", 0, 2, first),
        event("controller", "sample", 0, 5, second),
        event("engine", "decode", 0, 3),
        event("learner", "pack", 3, 4, first),
        event("engine", "decode", 4, 5),
        event("learner", "pack", 5, 6, second),
    ]
    time = step_time(events, window(6.0, shares_core=True))
    assert dict(time.actors["engine"].idle_s) == {Label.SHARED: 1, Label.LEARNER: 1}
    assert dict(time.actors["learner"].idle_s) == {Label.FIRST: 2, Label.SHARED: 1, Label.STRAGGLER: 1}
    assert time.bound_s == 6
    apart = step_time(events, window(6.0))
    assert dict(apart.actors["learner"].idle_s) == {Label.FIRST: 2, Label.STRAGGLER: 2}
    assert apart.actors["engine"].idle_s[Label.HAND_OVER] == 1


def test_time_in_the_engines_queue_is_not_on_the_critical_path() -> None:
    events = [
        event("controller", "trajectory", 0, 6, member(0)),
        event("controller", "queue", 1, 4, member(0)),
    ]
    assert step_time(events, window(6.0)).critical_s == 3


def test_a_packs_time_is_shared_by_tokens_and_what_uniform_groups_took_was_for_nothing() -> None:
    events = [
        event("learner", "pack", 0, 4, member(0), tokens=30),
        event("learner", "pack", 0, 4, member(1), tokens=10),
        event("learner", "pack", 4, 5, member(0, 1), tokens=0),
        event("sandbox", "verifier", 5, 6, member(0), detail="0.5"),
        event("sandbox", "verifier", 5, 6, member(1), detail="0.5"),
        event("sandbox", "verifier", 5, 6, member(0, 1), detail="0.5"),
    ]
    assert own_gradients(events) == {member(0): 3, member(1): 1, member(0, 1): 1}
    assert uniform_members(events) == {member(0), member(1)}, "a single reward compares with nothing"
    time = step_time(events, window(6.0))
    assert (time.gradient_s, time.wasted_s) == (5, 4)


def test_the_end_of_the_rollouts_on_its_way_to_the_learner_is_a_hand_over() -> None:
    time = step_time([event("controller", "settle", 0, 3), event("learner", "optimizer", 1, 3)], window(3.0))
    assert dict(time.actors["learner"].idle_s) == {Label.HAND_OVER: 1}
    assert dict(time.actors["engine"].idle_s) == {Label.LEARNER: 1, Label.SETTLE: 2}


def test_a_window_without_events_is_idle_for_no_reason() -> None:
    time = step_time([], window(3.0))
    assert {actor: dict(t.idle_s) for actor, t in time.actors.items()} == {a: {Label.NOTHING: 3.0} for a in ACTORS}
    assert "overlap" not in time.metrics()
    assert "above_bound" not in time.metrics()


def test_the_start_up_of_a_run_is_its_own_cause() -> None:
    start = event("controller", "start-up", 0, 3, detail="inline")
    assert windows([start])[0].name == "start-up inline"
    time = step_time([start], window(3.0))
    assert {actor: dict(t.idle_s) for actor, t in time.actors.items()} == {a: {Label.START_UP: 3.0} for a in ACTORS}


def test_windows_are_the_stretches_that_the_controller_marked() -> None:
    events = [
        event("controller", "step", 5, 9, step=1, detail="shared core"),
        event("controller", "evaluation", 0, 4, detail="before"),
        event("controller", "publish", 8, 9),
    ]
    assert [(w.name, w.step, w.shares_core) for w in windows(events)] == [
        ("evaluation before", -1, False),
        ("step 1", 1, True),
    ]


def test_every_cause_has_a_row_in_the_table() -> None:
    from thundersyncrl.observe import timeline

    for cause in CAUSES:
        assert f"| {cause} |" in (timeline.__doc__ or "")
