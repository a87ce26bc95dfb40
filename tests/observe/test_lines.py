"""Lines about steps, evaluations and trajectories."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.observe.records import make_report, make_trajectory
from thundersyncrl.observe.lines import cut_middle, evaluation_line, printable, step_line, transcript_lines
from thundersyncrl.observe.observer import EvaluationResult
from thundersyncrl.records import Outcome, Status


def test_a_step_without_metrics_is_a_line_all_the_same() -> None:
    assert step_line(make_report(step=7)) == "step 7"


def test_dropped_trajectories_are_told() -> None:
    report = replace(make_report(), num_trained=6, num_dropped=2)
    assert step_line(report) == "step 0  2 of 8 dropped"


def test_an_evaluation_tells_what_got_no_verdict() -> None:
    result = EvaluationResult(num=58, pass_rate=0.5, num_failed=2)
    assert evaluation_line("before", result) == "held-out, before: pass 50.0 % of 58, 2 without a verdict"


def test_a_transcript_tells_who_what_and_how_it_ended() -> None:
    trajectory = replace(make_trajectory(text="ls"), outcome=Outcome(status=Status.TRUNCATED, cause="turns"))
    assert transcript_lines(trajectory, None) == [
        "step=0/group=0/member=0  task copy-1  no reward  truncated (turns)",
        "  user:",
        "    Copy it.",
        "  assistant:",
        "    ls",
    ]


def test_long_messages_are_cut_in_the_middle() -> None:
    lines = transcript_lines(make_trajectory(text="a" * 500 + "b" * 500), 1.0, message_chars=101)
    assert lines[-1].strip() == "a" * 48 + " ... " + "b" * 48


@given(text=st.text(max_size=50), limit=st.integers(8, 40))
def test_cut_text_fits_and_keeps_both_ends(text: str, limit: int) -> None:
    cut = cut_middle(text, limit)
    assert len(cut) == min(len(text), limit)
    assert (cut[:1], cut[-1:]) == (text[:1], text[-1:])


@given(st.text())
def test_printable_text_has_no_control_characters_and_keeps_the_rest(text: str) -> None:
    shown = printable(text)
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    if all(c.isprintable() for c in text):
        assert shown == text


def test_a_steps_line_tells_overlap_and_idle_time_where_they_were_measured() -> None:
    metrics = {"overlap": 0.5, "idle_engine_s": 1.25, "idle_learner_s": 0.5, "above_bound": 0.1}
    line = "step 0  overlap 50 %  idle engine 1.2 s  idle learner 0.5 s  10 % above the bound"
    assert step_line(make_report(metrics=metrics)) == line
