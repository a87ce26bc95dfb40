"""What people see: plain lines in a log, a picture in a terminal, and never a control sequence of a model's."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from tests.observe.records import make_report, make_trajectory
from thundersyncrl.observe.display import LiveDisplay, PlainDisplay, SampleChoice, make_display
from thundersyncrl.observe.observer import EvaluationResult, Observer


def watch(display: Observer) -> None:
    """A short run: a warm start, two steps, an evaluation."""
    display.phase("warm start", "8 steps")
    display.progress("steps", 4, 8)
    display.sample(make_trajectory(step=0, text="ls -l"), 1.0)
    display.step(make_report(step=0, metrics={"reward_mean": 0.5, "pass_rate": 0.5, "tokens_per_s": 1234.0}))
    display.step(make_report(step=1, failures={"tool": 2}, metrics={"time_rollout_s": 2.5}))
    display.evaluation("after", EvaluationResult(num=60, pass_rate=0.75))
    display.close()
    display.close()


def test_a_log_gets_plain_lines() -> None:
    stream = io.StringIO()
    display = make_display(stream, num_steps=2, show_sample_every=1)
    assert isinstance(display, PlainDisplay)
    watch(display)
    lines = stream.getvalue().splitlines()
    assert [line.partition("] ")[2] for line in lines if line.startswith("[")] == [
        "warm start: 8 steps",
        "step 0  reward 0.500  pass 50.0 %  1,234 tokens/s",
        "step 1  rollout 2.5 s  2 of 8 failed (tool 2)",
        "held-out, after: pass 75.0 % of 60",
    ]
    assert "  |     ls -l" in lines
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_the_phase_the_steps_and_the_results_in_one_picture() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=40)
    display = LiveDisplay(console, num_steps=2, samples=SampleChoice(every=1))
    watch(display)
    seen = stream.getvalue()
    for expected in ("warm start: 8 steps", "steps 2 of 2", "0.500", "50.0 %", "1,234", "rollout s", "held-out, after"):
        assert expected in seen
    assert "ls -l" in seen
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1, "the cursor comes back, once"


def test_markup_and_control_characters_of_a_model_are_shown_and_not_obeyed() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    display = LiveDisplay(console, num_steps=1, samples=SampleChoice(every=1))
    display.sample(make_trajectory(step=0, text="[bold]x[/nothing] \x1b]0;title\x07 \udc80"), 1.0)
    display.step(make_report(step=0))
    display.close()
    assert "[bold]x[/nothing]" in stream.getvalue()
    assert "\\x1b]0;title\\x07 \\udc80" in stream.getvalue()
    assert "\x1b]0;" not in stream.getvalue()


def test_plain_progress_is_told_now_and_then_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    display = PlainDisplay(stream, samples=SampleChoice(every=0))
    for done in range(1, 64):
        now += 1.0
        display.progress("trajectories", done, 64)
    assert stream.getvalue().splitlines() == [
        f"[{second:6d} s]   trajectories {second} of 64" for second in (10, 20, 30, 40, 50, 60)
    ]


def test_the_sample_shown_is_the_best_and_then_the_longest() -> None:
    choice = SampleChoice(every=2)
    choice.offer(make_trajectory(step=2, member=0, text="failed", num_turns=3), 0.0)
    choice.offer(make_trajectory(step=2, member=1, text="short", num_turns=1), 1.0)
    choice.offer(make_trajectory(step=2, member=2, text="long", num_turns=2), 1.0)
    choice.offer(make_trajectory(step=2, member=3, text="broken", num_turns=4), None)
    shown = choice.take(2)
    assert "member=2" in shown[0]
    assert shown[-1].strip() == "long"
    assert choice.take(2) == []


@pytest.mark.parametrize(("every", "shown"), [(0, []), (1, [0, 1, 2, 3, 4, 5]), (5, [0, 5])])
def test_samples_are_shown_every_so_many_steps(every: int, shown: list[int]) -> None:
    choice = SampleChoice(every=every)
    for step in range(6):
        choice.offer(make_trajectory(step=step), 1.0)
    assert [step for step in range(6) if choice.take(step)] == shown


def test_the_picture_tells_overlap_and_idle_time_where_they_were_measured() -> None:
    stream = io.StringIO()
    display = LiveDisplay(
        Console(file=stream, force_terminal=True, width=140, height=40), num_steps=1, samples=SampleChoice(every=0)
    )
    metrics = {"overlap": 0.83, "idle_engine_s": 1.5, "idle_learner_s": 2.5, "above_bound": 0.07}
    display.step(make_report(step=0, metrics=metrics))
    display.close()
    for expected in ("idle engine s", "1.5", "idle learner s", "2.5", "overlap", "83 %", "above bound", "7 %"):
        assert expected in stream.getvalue()
