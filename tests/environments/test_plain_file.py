"""What a task's own files may be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thundersyncrl.environments.plain_file import MAX_BYTES, read_plain_text
from thundersyncrl.errors import TaskError


def test_text_is_read_and_lines_end_in_one_way(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("größer\r\nzwei\n".encode())
    assert read_plain_text(tmp_path / "a") == "größer\nzwei\n"


@pytest.mark.timeout(10)
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TaskError, match="expected a plain file"):
        read_plain_text(tmp_path / "pipe")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(tmp_path: Path, device: str) -> None:
    (tmp_path / "link").symlink_to(device)
    with pytest.raises(TaskError, match="expected a plain file"):
        read_plain_text(tmp_path / "link")


def test_too_much_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * (MAX_BYTES + 1))
    with pytest.raises(TaskError, match="at most 1,048,576 bytes"):
        read_plain_text(tmp_path / "a")


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_what_is_not_text_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        (tmp_path / "a").mkdir()
    else:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(TaskError, match="expected"):
        read_plain_text(tmp_path / "a")
