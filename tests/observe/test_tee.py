"""Several observers hear the same, in order, and all are closed."""

from __future__ import annotations

import io

import pytest

from tests.observe.records import make_report, make_trajectory
from thundersyncrl.observe.display import PlainDisplay, SampleChoice
from thundersyncrl.observe.observer import EvaluationResult
from thundersyncrl.observe.tee import Tee


class Failing(Tee):
    """Can't be closed."""

    def close(self) -> None:
        raise OSError("disk full")


class Counting(Tee):
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_all_hear_everything() -> None:
    streams = [io.StringIO(), io.StringIO()]
    tee = Tee(*(PlainDisplay(stream, samples=SampleChoice(every=1)) for stream in streams))
    tee.phase("training")
    tee.progress("trajectories", 1, 2)
    tee.sample(make_trajectory(), 1.0)
    tee.step(make_report())
    tee.evaluation("after", EvaluationResult(num=1, pass_rate=1.0))
    tee.close()
    texts = [stream.getvalue() for stream in streams]
    assert texts[0] == texts[1]
    assert all(word in texts[0] for word in ("training", "step 0", "member=0", "held-out, after"))


def test_an_observer_that_fails_to_close_keeps_no_other_open() -> None:
    counting = Counting()
    with pytest.raises(OSError, match="disk full"):
        Tee(Failing(), counting).close()
    assert counting.closed == 1
