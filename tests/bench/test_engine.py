"""`bench engine`: one small real round of both arms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thundersyncrl.bench.engine import main
from thundersyncrl.bench.random_model import ModelSize, save_random_model


def test_both_arms_sample_what_was_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_random_model(tmp_path, ModelSize(layers=1, width=32), context_tokens=64)
    arguments = ["--batch", "1", "3", "--prompt-tokens", "5", "--new-tokens", "4", "--repetitions", "1", "--json"]
    assert main(["--model", str(tmp_path), *arguments]) == 0
    out, err = capfd.readouterr()
    figures = json.loads(out)
    assert set(figures["arms"]) == {"generate@1", "embedded@1", "generate@3", "embedded@3"}
    assert set(figures["ratios"]) == {"1", "3"}
    assert all(speed > 0 for speed in figures["arms"].values())
    assert "embedded" in err


def test_the_help_has_an_example(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "thundersyncrl bench engine" in capfd.readouterr().out


def test_no_sequences_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--batch", "0"])
    assert "expected a positive number, got 0" in capfd.readouterr().err
