"""The picture of a run."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from tests.observe.records import make_report
from thundersyncrl.errors import ConfigError
from thundersyncrl.observe.metrics import MetricsFile
from thundersyncrl.observe.observer import EvaluationResult
from thundersyncrl.observe.plot import plot_curves


def record(path: Path, *, num_steps: int) -> None:
    file = MetricsFile(path)
    file.evaluation("before", EvaluationResult(num=4, pass_rate=0.0))
    for step in range(num_steps):
        metrics = {"reward_mean": 0.1 * step, "pass_rate": 0.1 * step, "mismatch_max": 1e-6, "mismatch_mean": 0.0}
        metrics |= {"action_tokens_mean": 20.0, "turns_mean": 2.0, "time_rollout_s": 3.0, "time_learn_s": 1.0}
        file.step(make_report(step=step, metrics=metrics if step else {}))
    file.evaluation("after", EvaluationResult(num=4, pass_rate=0.9))


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_picture_is_drawn_from_whatever_there_is(tmp_path: Path, num_steps: int) -> None:
    pytest.importorskip("matplotlib")
    record(tmp_path / "metrics.jsonl", num_steps=num_steps)
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="at least one step or evaluation"):
        plot_curves(tmp_path / "absent.jsonl", tmp_path / "curves.png")
    MetricsFile(tmp_path / "metrics.jsonl").phase("loading")
    with pytest.raises(ConfigError, match="at least one step or evaluation"):
        plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'thundersyncrl\[plot\]'"):
        plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
