"""Text of a task's own files, which somebody else made: only a plain file of moderate size is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from thundersyncrl.errors import TaskError

MAX_BYTES = 1 << 20


def read_plain_text(file: Path) -> str:
    """Return the UTF-8 text of a plain file; a FIFO or device isn't waited for.

    Raises:
        TaskError: it isn't a plain file, is longer than `MAX_BYTES`, or isn't UTF-8.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise TaskError(f"expected a plain file, got something else ({file})")
            content = opened.read(MAX_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise TaskError(f"expected readable UTF-8 text, got {error} ({file})") from error
    if len(content) > MAX_BYTES:
        raise TaskError(f"expected at most {MAX_BYTES:,} bytes of text, got more ({file})")
    return text.replace("\r\n", "\n")
