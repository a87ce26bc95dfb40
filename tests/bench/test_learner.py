"""`bench learner` on two groups: its object, and that every arm computes the same gradient."""

from __future__ import annotations

import json

import pytest

from thundersyncrl.bench.learner import main


def test_the_object_has_arms_and_ratios_and_every_arm_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--groups", "2", "--repetitions", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["arms"]) == {"padded", "packed", "final", "group", "trajectory", "turn", "half_uniform"}
    assert set(figures["ratios"]) == {"final", "group", "trajectory", "turn", "half_uniform"}
    assert figures["ratios"]["half_uniform"] == pytest.approx(
        figures["arms"]["half_uniform"] / figures["arms"]["final"]
    )
    assert all(error < 5e-6 for error in figures["details"]["errors"].values())
