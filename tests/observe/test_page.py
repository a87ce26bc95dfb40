"""The report's page in a real browser, without a window.

THUNDERSYNCRL_SCREENSHOT=docs/images/report.png with this file's tests writes the picture of the docs.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.observe.test_report import HOSTILE, id_of, make_run
from tests.test_runs import model_folder, tiny_config
from thundersyncrl.observe.metrics import MetricsFile
from thundersyncrl.observe.report import write_report
from thundersyncrl.observe.run_record import read_run
from thundersyncrl.observe.tee import Tee
from thundersyncrl.observe.transcripts import TranscriptsFile
from thundersyncrl.runs import train_run
from thundersyncrl.runtime.run_folder import RunFolder, open_run

__all__ = ["model_folder"]

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: install chromium")
PNG = b"\x89PNG\r\n\x1a\n"


def browse(page: Path, home: Path, *options: str) -> str:
    """Return what the browser prints about a page once its script has run."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command += [f"--user-data-dir={home / 'profile'}", "--virtual-time-budget=5000", *options]
    done = subprocess.run(
        [*command, page.resolve().as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def lanes_of(document: str) -> list[str]:
    return re.findall(r'data-lane="([^"]*)"', document)


def rows_of(document: str) -> set[str]:
    return set(re.findall(r'data-trajectory="([^"]*)"', document))


def test_the_timeline_and_the_table_show_the_runs_trajectories_and_hostile_text_as_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", task=HOSTILE, reason=HOSTILE)
    write_report(folder, read_run(folder))
    document = browse(folder.report, tmp_path, "--dump-dom")
    assert 'data-ready="yes"' in document, "the script ran to its end"
    assert "data-hacked" not in document
    assert rows_of(document) == {id_of(s, m) for s in (0, 1) for m in (0, 1)}
    assert lanes_of(document) == ["engine", "learner", "sandbox", id_of(1, 0), id_of(1, 1)], "the newest step is shown"
    timeline = document.partition('id="timeline"')[2].partition('id="timeline-legend"')[0]
    assert timeline.count("<rect") > 15
    table = html.unescape(document.partition('<table id="trajectories">')[2])
    assert '<script>document.body.dataset.hacked="yes"</script> "quotes"' in table


def test_a_run_without_events_has_a_page_that_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.events.unlink()
    write_report(folder, read_run(folder))
    document = browse(folder.report, tmp_path, "--dump-dom")
    assert 'data-ready="yes"' in document
    assert "events.jsonl is missing" in document
    assert len(rows_of(document)) == 4


@pytest.mark.sandbox
def test_a_real_run_is_on_its_page_and_can_be_photographed(model_folder: Path, tmp_path: Path) -> None:
    rollout = {"groups_per_step": 3, "group_size": 4, "max_turns": 3, "max_turn_tokens": 24, "max_action_tokens": 64}
    config = tiny_config(model_folder, tmp_path / "run", steps=4, rollout=rollout, model={"threads": 2})
    folder = open_run(config, resume=False)
    train_run(config, resume=False, sink=Tee(MetricsFile(folder.metrics), TranscriptsFile(folder.transcripts)))
    run = read_run(RunFolder(folder.path))
    assert run.problems == ()
    write_report(folder, run)
    document = browse(folder.report, tmp_path, "--dump-dom")
    members = {f"step={s}/group={g}/member={m}" for s in range(4) for g in range(3) for m in range(4)}
    assert rows_of(document) == members
    assert set(lanes_of(document)) == {"engine", "learner", "sandbox"} | {m for m in members if m.startswith("step=3/")}
    picture = Path(os.environ.get("THUNDERSYNCRL_SCREENSHOT") or tmp_path / "report.png").resolve()
    browse(folder.report, tmp_path, "--window-size=1200,1000", f"--screenshot={picture}")
    assert picture.read_bytes().startswith(PNG)
    assert picture.stat().st_size > 20_000, "an empty page is smaller"
