"""The metrics file: one object a line, finite numbers only, on disk at once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.observe.records import make_report, make_trajectory
from thundersyncrl.errors import ContractError, NumericsError
from thundersyncrl.observe.metrics import MetricsFile
from thundersyncrl.observe.observer import EvaluationResult
from thundersyncrl.runtime.json_lines import read_lines


def without_time(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{key: value for key, value in row.items() if key != "elapsed_s"} for row in rows]


def test_steps_evaluations_and_phases_are_written_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.phase("warm start", "8 steps")
    file.evaluation("warm", EvaluationResult(num=4, pass_rate=0.25, by_kind={"git": 0.25}, seconds=2.0))
    file.sample(make_trajectory(), 1.0)
    file.progress("trajectories", 1, 8)
    file.step(make_report(step=0, failures={"tool": 1}, metrics={"reward_mean": 0.5}))
    file.evaluation("step 1", EvaluationResult(num=4, pass_rate=0.5))
    empty = {"several_turns_pass_rate": None, "num_failed": 0}
    assert without_time(read_lines(path)) == [
        {"event": "phase", "step": 0, "name": "warm start", "detail": "8 steps"},
        {"event": "evaluation", "name": "warm", "step": 0, "pass_rate": 0.25, "by_kind": {"git": 0.25}, "num": 4}
        | {"seconds": 2.0}
        | empty,
        {"event": "step", "step": 0, "version": 0, "num_launched": 8, "num_trained": 7, "num_dropped": 0}
        | {"num_failed": 1, "failures": {"tool": 1}, "level": "", "reward_mean": 0.5},
        {"event": "evaluation", "name": "step 1", "step": 1, "pass_rate": 0.5, "by_kind": {}, "num": 4}
        | {"seconds": 0.0}
        | empty,
    ]
    assert all(row["elapsed_s"] >= 0 for row in read_lines(path))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_by_name_and_nothing_is_written(tmp_path: Path, bad: float) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(NumericsError, match="gradient_norm"):
        file.step(make_report(metrics={"reward_mean": 1.0, "gradient_norm": bad}))
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["step", "event", "num_failed", "elapsed_s"])
def test_a_metric_may_not_take_the_name_of_a_field(tmp_path: Path, name: str) -> None:
    with pytest.raises(ContractError, match=name):
        MetricsFile(tmp_path / "metrics.jsonl").step(make_report(metrics={name: 1.0}))


def test_an_evaluation_of_a_resumed_run_belongs_to_the_step_that_is_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).step(make_report(step=4))
    MetricsFile(path).evaluation("after", EvaluationResult(num=1, pass_rate=1.0))
    assert read_lines(path)[-1]["step"] == 5


@pytest.mark.parametrize(
    "rates",
    [{"pass_rate": 1.5}, {"pass_rate": 0.5, "by_kind": {"git": -1.0}}, {"pass_rate": math.nan}],
)
def test_a_rate_that_is_no_rate_is_refused(rates: dict[str, object]) -> None:
    with pytest.raises(ContractError, match="between 0 and 1"):
        EvaluationResult(num=1, **rates)  # pyright: ignore[reportArgumentType]
