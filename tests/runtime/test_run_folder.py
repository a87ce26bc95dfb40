"""The run folder: no run writes over another, and a resumed run is the run that it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thundersyncrl.config import Config, load_config, parse_config
from thundersyncrl.errors import ConfigError
from thundersyncrl.runtime.json_lines import append_line, read_lines
from thundersyncrl.runtime.run_folder import MAY_DIFFER, RunFolder, check_new_file, open_run


def config_of(run: Path, *overrides: str) -> Config:
    return parse_config({"run": str(run)}, overrides)


def began(run: Path) -> RunFolder:
    """A run with three steps, an evaluation after the second, and its end."""
    folder = open_run(config_of(run), resume=False)
    append_line(folder.metrics, {"event": "phase", "step": 0, "name": "training"})
    append_line(folder.metrics, {"event": "evaluation", "step": 0, "name": "before"})
    for step in range(3):
        append_line(folder.transcripts, {"step": step, "member": 0})
        append_line(folder.transcripts, {"step": step, "member": 1})
        append_line(folder.metrics, {"event": "step", "step": step})
        if step == 1:
            append_line(folder.metrics, {"event": "evaluation", "step": 2, "name": "step 2"})
    append_line(folder.metrics, {"event": "evaluation", "step": 3, "name": "after"})
    folder.write_summary({"pass_rate_after": 0.5})
    return folder


def test_a_new_run_has_its_resolved_config_and_a_place_for_checkpoints(tmp_path: Path) -> None:
    config = config_of(tmp_path / "deep" / "run", "steps=3", "evaluation=none")
    folder = open_run(config, resume=False)
    assert load_config(folder.config) == config
    assert folder.checkpoints.is_dir()
    assert {path.name for path in folder.path.iterdir()} == {"config.toml", "checkpoints", "lock"}


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    began(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"--resume, or set another with run="):
        open_run(config_of(tmp_path / "run"), resume=False)


def test_a_folder_that_holds_anything_else_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files"):
        open_run(config_of(tmp_path), resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_checkpoint_alone_makes_a_run(tmp_path: Path) -> None:
    folder = open_run(config_of(tmp_path / "run"), resume=False)
    (folder.checkpoints / "step-1").mkdir()
    with pytest.raises(ConfigError, match="holds files"):
        open_run(config_of(tmp_path / "run"), resume=False)


def test_a_run_that_failed_before_it_measured_anything_can_start_again(tmp_path: Path) -> None:
    folder = open_run(config_of(tmp_path / "run"), resume=False)
    append_line(folder.metrics, {"event": "phase", "step": 0, "name": "loading the model"})
    (folder.tasks / "train").mkdir(parents=True)
    again = open_run(config_of(tmp_path / "run", "steps=4"), resume=False)
    assert not again.metrics.exists()
    assert load_config(again.config).steps == 4


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start it without --resume"):
        open_run(config_of(tmp_path / "run"), resume=True)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_may_go_further_and_record_otherwise(tmp_path: Path) -> None:
    began(tmp_path / "run")
    overrides = ("steps=99", "checkpoint_every=1", "show_sample_every=0", "model.threads=1", "evaluation.every=3")
    overrides = (*overrides, "trackers=tensorboard")
    assert {override.partition("=")[0] for override in overrides} == MAY_DIFFER - {"run"}
    folder = open_run(config_of(tmp_path / "run", *overrides), resume=True)
    assert load_config(folder.config).steps == 99
    assert len(read_lines(folder.metrics)) == 7, "opening alone takes nothing away"


def test_a_run_that_was_moved_can_be_resumed(tmp_path: Path) -> None:
    began(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert load_config(open_run(config_of(tmp_path / "moved"), resume=True).config).run == str(tmp_path / "moved")


def test_another_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    folder = began(tmp_path / "run")
    written = folder.config.read_text()
    with pytest.raises(ConfigError) as caught:
        open_run(config_of(folder.path, "learner.learning_rate=0.5", "evaluation=none", "steps=9"), resume=True)
    message = str(caught.value)
    assert "learner.learning_rate: 1e-05 in the run, 0.5 now" in message
    assert "evaluation: 'absent' in the run, None now" in message
    assert "evaluation.num_tasks: 60 in the run, 'absent' now" in message
    assert "steps:" not in message
    assert folder.config.read_text() == written


@pytest.mark.parametrize(
    ("next_step", "events", "transcript_steps"),
    [
        (3, ["training", "before", 0, 1, "step 2", 2], [0, 0, 1, 1, 2, 2]),
        (2, ["training", "before", 0, 1, "step 2"], [0, 0, 1, 1]),
        (1, ["training", "before", 0], [0, 0]),
        (0, ["training", "before"], []),
    ],
)
def test_what_comes_again_is_forgotten(
    tmp_path: Path, next_step: int, events: list[str | int], transcript_steps: list[int]
) -> None:
    folder = began(tmp_path / "run")
    folder.truncate(next_step)
    assert [row.get("name", row["step"]) for row in read_lines(folder.metrics)] == events
    assert [row["step"] for row in read_lines(folder.transcripts)] == transcript_steps
    assert not folder.summary.exists()


def test_a_line_that_was_cut_by_a_crash_is_forgotten_too(tmp_path: Path) -> None:
    folder = began(tmp_path / "run")
    with folder.metrics.open("a") as file:
        file.write('{"event": "st')
    folder.truncate(3)
    append_line(folder.metrics, {"event": "step", "step": 3})
    assert [row["step"] for row in read_lines(folder.metrics) if row["event"] == "step"] == [0, 1, 2, 3]


def test_a_run_without_records_can_be_truncated(tmp_path: Path) -> None:
    folder = open_run(config_of(tmp_path / "run"), resume=False)
    folder.truncate(0)
    assert not any(path.exists() for path in (folder.metrics, folder.transcripts, folder.events, folder.summary))


def test_the_summary_is_one_json_object(tmp_path: Path) -> None:
    folder = began(tmp_path / "run")
    assert json.loads(folder.summary.read_text()) == {"pass_rate_after": 0.5}


def test_a_run_can_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    for resume in (False, True):
        with pytest.raises(ConfigError):
            open_run(config_of(tmp_path / "run"), resume=resume)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="can be written"):
        open_run(config_of(tmp_path / "run"), resume=False)


def test_a_file_to_be_written_at_the_end_is_checked_at_the_start(tmp_path: Path) -> None:
    check_new_file(tmp_path / "deep/new.jsonl")
    (tmp_path / "old").touch()
    for path in (tmp_path / "old", tmp_path / "old/below", tmp_path / ("x" * 300), Path("/proc/absent/file")):
        with pytest.raises(ConfigError, match="--output"):
            check_new_file(path)


def test_a_folder_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    config = Config(run=str(tmp_path / "run"))
    program = (
        "import sys; from thundersyncrl.config import Config; from thundersyncrl.runtime.run_folder import open_run\n"
        "open_run(Config(run=sys.argv[1]), resume=False); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, config.run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        for resume in (False, True):
            with pytest.raises(ConfigError, match="in use by another run"):
                open_run(config, resume=resume)
        other.kill()
    open_run(config, resume=False)  # the lock ended with its owner


def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="new or empty folder"):
        open_run(Config(run=str(tmp_path)), resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_name_that_no_folder_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected `run` to be a folder"):
        open_run(Config(run="a\0b"), resume=False)
