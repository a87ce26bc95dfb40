"""Events: they travel, they are written at a step's end, and what is broken in their file is left out and told."""

from __future__ import annotations

import math
import pickle
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.errors import NumericsError
from thundersyncrl.observe.event_file import JOIN_GAP_S, JOIN_S, EventWriter, joined, read_events
from thundersyncrl.observe.events import Event, EventBuffer, EventLog, NoEvents, record
from thundersyncrl.observe.intervals import clip, overlap_seconds, seconds, union
from thundersyncrl.runtime.json_lines import read_lines
from thundersyncrl.runtime.run_folder import RunFolder


def decode(start_s: float, end_s: float, *, step: int = -1, tokens: int = 1) -> Event:
    return Event(actor="engine", what="decode", start_s=start_s, end_s=end_s, step=step, tokens=tokens)


def test_an_event_travels_between_processes_and_every_log_takes_a_batch(tmp_path: Path) -> None:
    batch = [decode(0.0, 1.0), Event(actor="sandbox", what="tool", start_s=1, end_s=2, trajectory="t", detail="d")]
    arrived = pickle.loads(pickle.dumps(batch))
    assert arrived == batch
    logs: list[EventLog] = [EventBuffer(), EventWriter(tmp_path / "events.jsonl"), NoEvents()]
    for log in logs:
        log.extend(arrived)
        record(log, 0.0, "learner", "work")
    assert [len(log.flush(0)) for log in logs] == [3, 3, 0]


def test_nothing_is_written_before_a_flush_and_steps_are_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventWriter(path)
    log.add(decode(0.0, 1.0))
    log.add(decode(5.0, 6.0, step=3))
    assert not path.exists()
    assert [event.step for event in log.flush(7)] == [7, 3]
    assert log.flush(8) == ()
    clock, *rows = read_lines(path)
    assert clock["what"] == "clock"
    assert [(row["start_s"], row["step"], row["tokens"]) for row in rows] == [(0.0, 7, 1), (5.0, 3, 1)]


def test_events_that_come_from_other_threads_while_one_flushes_are_all_kept() -> None:
    log, taken = EventBuffer(), list[Event]()

    def emit() -> None:
        for i in range(2000):
            log.add(decode(i, i))

    threads = [threading.Thread(target=emit) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += log.flush(0)
    taken += log.flush(0)
    assert len(taken) == 6000


def test_a_time_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    log = EventWriter(tmp_path / "events.jsonl")
    log.add(decode(0.0, math.nan))
    with pytest.raises(NumericsError, match="end_s"):
        log.flush(0)


SPANS = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 300)), max_size=40)


@given(SPANS)
def test_joined_slices_keep_tokens_and_time_but_for_the_gaps(spans: list[tuple[int, int]]) -> None:
    """One actor's slices never overlap; in units of 0.1 ms."""
    events, now = list[Event](), 0.0
    for gap, length in spans:
        now += gap * 1e-4 / 100
        events.append(decode(now, now + length * 1e-4))
        now += length * 1e-4
    found = joined(events)
    assert sum(e.tokens for e in found) == len(events)
    lost = sum(e.seconds for e in found) - sum(e.seconds for e in events)
    assert -1e-9 <= lost <= JOIN_GAP_S * len(events)
    assert all(e.seconds <= max(JOIN_S, 0.03) + 1e-9 for e in found)


def test_events_of_trajectories_are_never_joined() -> None:
    tools = [
        Event(actor="sandbox", what="tool", start_s=t, end_s=t + 0.01, trajectory="one") for t in (0.0, 0.01, 0.02)
    ]
    assert joined(tools) == tools


def test_a_file_is_read_back_in_seconds_since_its_first_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventWriter(path)
    log.extend([decode(100.0, 101.0), decode(103.0, 104.0)])
    log.flush(0)
    read = read_events(path)
    assert read.problems == ()
    assert [(round(e.start_s, 4), round(e.end_s, 4)) for e in read.events] == [(0.0, 1.0), (3.0, 4.0)]


def test_a_run_that_went_on_after_a_restart_of_the_machine_goes_on_in_time(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(
        '{"what": "clock", "monotonic_s": 5000.0, "unix_s": 1000000.0, "step": 0}\n'
        '{"actor": "engine", "what": "decode", "start_s": 5000.0, "end_s": 5001.0, "step": 0}\n'
        '{"what": "clock", "monotonic_s": 10.0, "unix_s": 1000100.0, "step": 1}\n'
        '{"actor": "engine", "what": "decode", "start_s": 11.0, "end_s": 12.0, "step": 1}\n'
    )
    assert [(e.start_s, e.end_s) for e in read_events(path).events] == [(0.0, 1.0), (101.0, 102.0)]


def test_what_is_missing_or_broken_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    assert "missing" in read_events(tmp_path / "events.jsonl").problems[0]
    path = tmp_path / "events.jsonl"
    good = '{"actor": "engine", "what": "decode", "start_s": 1.0, "end_s": 2.0, "step": 0}\n'
    bad = ["[]\n", "7\n", "{}\n", '{"actor": "e", "what": "w", "start_s": 2, "end_s": 1}\n', '{"actor": "eng']
    path.write_text(good + "".join(bad))
    read = read_events(path)
    assert (len(read.events), read.problems) == (1, ("5 lines of events.jsonl are broken and left out.",))
    path.write_text("")
    assert read_events(path).problems == ("events.jsonl holds no events.",)


def test_a_resumed_run_forgets_the_events_of_steps_that_come_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log = EventWriter(folder.events)
    for step in (-1, 0, 1, 2):
        log.add(decode(float(step), step + 0.5))
        log.flush(step)
    with folder.events.open("a") as file:
        file.write('{"actor": "engine", "wh')  # a crash
    folder.truncate(2)
    assert [e.step for e in read_events(folder.events).events] == [-1, 0, 1]
    assert read_events(folder.events).problems == ()


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=12)


@given(INTERVALS, INTERVALS)
def test_sets_of_time_agree_with_sets_of_seconds(left: list[list[int]], right: list[list[int]]) -> None:
    def ticks(spans: list[list[int]]) -> set[int]:
        return {t for start, end in spans for t in range(start, end)}

    one, two = union((a, b) for a, b in left), union((a, b) for a, b in right)
    assert seconds(one) == len(ticks(left))
    assert overlap_seconds(one, two) == len(ticks(left) & ticks(right))
    assert seconds(clip(one, 5, 20)) == len(ticks(left) & set(range(5, 20)))
