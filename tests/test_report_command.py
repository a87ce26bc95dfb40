"""The command `report`: what it writes, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.observe.test_report import make_run
from thundersyncrl.cli import app
from thundersyncrl.errors import ConfigError

RUNNER = CliRunner()


def test_it_writes_the_page_and_the_trace_and_says_where(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    done = RUNNER.invoke(app, ["report", str(folder.path)])
    assert done.exit_code == 0
    assert str(folder.report) in done.stdout
    assert folder.report.read_text().startswith("<!doctype html>")
    assert json.loads(folder.trace.read_text())["traceEvents"]


def test_json_is_one_object_on_stdout_and_notes_go_to_stderr(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.transcripts.unlink()
    done = RUNNER.invoke(app, ["report", str(folder.path), "--json"])
    found = json.loads(done.stdout)
    assert found["steps"]["num"] == 2
    assert found["num_trajectories"] == 4, "those of the events"
    assert "transcripts.jsonl is missing" in done.stderr


def test_the_page_is_opened_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(typer, "launch", opened.append)
    folder = make_run(tmp_path / "run")
    RUNNER.invoke(app, ["report", str(folder.path)])
    assert opened == []
    RUNNER.invoke(app, ["report", str(folder.path), "--open"])
    assert opened == [str(folder.report)]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    done = RUNNER.invoke(app, ["report", str(tmp_path / "nothing")])
    assert isinstance(done.exception, ConfigError)
    assert "nothing" in str(done.exception)
