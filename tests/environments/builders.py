"""Builders for tests of worlds: task folders, sandboxes, and a look at what processes are alive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TASK_TOML = """schema_version = "1.4"
[metadata]
kind = "files"
difficulty = "easy"
several_turns = false
[environment]
network_mode = "no-network"
"""

DOCKERFILE = "FROM debian:12\nWORKDIR /app\n"

VERIFIER = """#!/bin/bash
if [ "$(cat /app/out.txt)" = hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(
    folder: Path,
    *,
    toml: str = TASK_TOML,
    instruction: str = "Write hello into /app/out.txt",
    dockerfile: str = DOCKERFILE,
    verifier: str = VERIFIER,
    solution: str = "echo hello > /app/out.txt\n",
    files: Mapping[str, str] | None = None,
) -> Path:
    """Return a task folder with these texts; `files` lie in the build context."""
    texts = {
        "task.toml": toml,
        "instruction.md": instruction,
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": verifier,
        "solution/solve.sh": solution,
        **{f"environment/{name}": text for name, text in (files or {}).items()},
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def _parents() -> dict[int, tuple[int, str]]:
    """Return every process with its parent and its state."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(entry.name)] = (int(fields[1]), fields[0])
    return found


def children(pid: int) -> list[int]:
    """Return the processes whose parent is `pid`."""
    return [child for child, (parent, _) in _parents().items() if parent == pid]


def descendants(pid: int) -> dict[int, str]:
    """Return every process below `pid` by parent chain, with its state; zombies are in state Z."""
    parents = _parents()
    found: dict[int, str] = {}
    grown = True
    while grown:
        grown = False
        for child, (parent, state) in parents.items():
            if child not in found and (parent == pid or parent in found):
                found[child] = state
                grown = True
    return found


def own_descendants() -> dict[int, str]:
    return descendants(os.getpid())


def processes_with(marker: str) -> list[int]:
    """Return the live processes whose command line holds `marker`."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if marker in words:
                found.append(int(entry.name))
    return found
