"""The folder that a run writes: where each file lies, and who may write there.

    config.toml         the resolved config, every key
    metrics.jsonl       steps, evaluations and phases
    transcripts.jsonl   every finished trajectory
    events.jsonl        what every actor did when
    checkpoints/        weights, optimizer, random states, data position
    tasks/              task folders that the run generated, where the config names none
    curves.png          the metrics as a picture
    trackers/           what experiment trackers keep on this machine
    summary.json        the result
    lock                held while a run writes here
    report.html         the page that `report` writes, and
    trace.json          its trace for Perfetto

A new run never writes into a folder that holds anything; a resumed one only where the same run went before.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thundersyncrl.config import Config, load_config
from thundersyncrl.config_keys import flatten
from thundersyncrl.config_toml import to_toml
from thundersyncrl.errors import ConfigError
from thundersyncrl.runtime.json_lines import read_lines, replace_lines

MAY_DIFFER = frozenset(
    {"steps", "run", "checkpoint_every", "show_sample_every", "trackers", "model.threads", "evaluation.every"}
)
"""Keys that a resumed run may change: none of them changes what a step computes."""

_HELD: list[int] = []
"""Locks of the runs of this process, until it ends."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def transcripts(self) -> Path:
        return self.path / "transcripts.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def trackers(self) -> Path:
        return self.path / "trackers"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tasks(self) -> Path:
        return self.path / "tasks"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the result of the run."""
        _write_whole(self.summary, json.dumps(dict(summary), indent=2, allow_nan=False) + "\n")

    def truncate(self, next_step: int) -> None:
        """Forget what was recorded of `next_step` and later steps, and the end of the run.

        A run goes on from a checkpoint that may be older than its last recorded step, so steps come again.
        """
        _keep_lines(self.metrics, lambda rows: _metrics_before(rows, next_step))
        for path in (self.transcripts, self.events):
            _keep_lines(path, lambda rows: [row for row in rows if row["step"] < next_step])
        self.summary.unlink(missing_ok=True)


def open_run(config: Config, *, resume: bool) -> RunFolder:
    """Return the folder `config.run`, new or checked for a resumed run, with the config written.

    Raises:
        ConfigError: the folder holds something and `resume` is off; or it is on and there is no run, or one
            with another config; or the folder can't be written, or another process writes it.
    """
    folder = RunFolder(Path(config.run))
    try:
        if resume:
            _check_same_run(folder, config)
        else:
            _refuse_used(folder)
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        if not resume:
            for left in (folder.metrics, folder.transcripts, folder.events):
                left.unlink(missing_ok=True)
        _write_whole(folder.config, to_toml(config))
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # a NUL character in the name is a ValueError
        raise ConfigError(
            f"expected `run` to be a folder that can be written, got {error}; set another with run=..."
        ) from error
    return folder


def _lock(folder: RunFolder) -> None:
    """Keep other processes out of the folder as long as this one lives; the kernel lets go of it at any end."""
    descriptor = os.open(folder.lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"expected a run folder that nobody writes, got one in use by another run ({folder.path}); wait for its "
            "end, or set another with run=..."
        ) from None
    _HELD.append(descriptor)  # closing any descriptor of the file would let go of the lock


def check_new_file(path: Path) -> None:
    """Make the folder of a file that a command will write at its end, so that no work is lost then.

    Raises:
        ConfigError: the file exists, or can't be written.
    """
    try:
        exists = path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"expected a file that can be written, got {error}; choose another with --output") from error
    if exists:
        raise ConfigError(f"expected a new file, got one that exists ({path}); choose another with --output")
    try:
        path.touch(exist_ok=False)  # rights alone don't tell: root seems to have all, a file system may be read-only
        path.unlink()
    except OSError as error:
        raise ConfigError(f"expected a file that can be written, got {error}; choose another with --output") from error


def _refuse_used(folder: RunFolder) -> None:
    if not _never_began(folder):
        raise ConfigError(
            f"expected a new or empty folder for the run, got one that holds files ({folder.path}); "
            "go on with --resume, or set another with run=..."
        )


def _never_began(folder: RunFolder) -> bool:
    """Return True for a folder that is new or empty, or where a run failed before it measured anything."""
    if not folder.path.exists():
        return True
    files = {folder.config, folder.metrics, folder.transcripts, folder.events, folder.lock}
    known = files | {folder.checkpoints, folder.tasks, folder.trackers}
    if not known.issuperset(folder.path.iterdir()):
        return False
    if folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir()):
        return False
    rows = read_lines(folder.metrics) if folder.metrics.exists() else []
    return all(row["event"] == "phase" for row in rows)


def _check_same_run(folder: RunFolder, config: Config) -> None:
    if not folder.config.exists():
        raise ConfigError(
            f"expected a run to resume, got a folder without config.toml ({folder.path}); "
            "start it without --resume, or name the run with run=..."
        )
    before, now = flatten(load_config(folder.config)), flatten(config)
    changed = sorted(
        key
        for key in before.keys() | now.keys()
        if key not in MAY_DIFFER and before.get(key, "absent") != now.get(key, "absent")
    )
    if changed:
        lines = [
            f"  {key}: {before.get(key, 'absent')!r} in the run, {now.get(key, 'absent')!r} now" for key in changed
        ]
        raise ConfigError(
            f"expected the config of the run to resume ({folder.config}), got another:\n"
            + "\n".join(lines)
            + "\nresume with the same values, or start a new run with run=..."
        )


def _metrics_before(rows: list[dict[str, Any]], next_step: int) -> list[dict[str, Any]]:
    """Return the rows up to the first step that comes again; the order of the file is the order of events."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row["event"] == "step" and row["step"] >= next_step:
            break
        if not (row["event"] == "evaluation" and row["name"] == "after"):
            kept.append(row)
    return kept


def _keep_lines(path: Path, choose: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    if path.exists():
        replace_lines(path, choose(read_lines(path)))


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
