"""A git repository as bytes, made without running git, so that it is the same everywhere.

Source: gitformat-index(5) and the chapter "Git Objects" of Pro Git (git-scm.com/book).
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MAIN: Final = "main"
AUTHOR: Final = "Robin <robin@example.com>"
FIRST_COMMIT_S: Final = 1_700_000_000
"""Date of the first commit, in seconds since 1970; each later one is an hour younger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """All files (no folders) as they were, and the message. The parent is the commit before it."""

    files: Mapping[str, bytes]
    message: str


class Repository:
    """Collects objects; `content` is then what lies in `.git`."""

    def __init__(self, history: Sequence[Commit]) -> None:
        self.content: dict[str, bytes] = {
            "HEAD": f"ref: refs/heads/{MAIN}\n".encode(),
            "config": b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n",
        }
        self.commits: list[str] = []
        """Object names, oldest first."""
        for age, commit in enumerate(history):
            self.commits.append(self._commit(commit, date_s=FIRST_COMMIT_S + 3600 * age))
        self.add_branch(MAIN)
        self.content["index"] = self._index(history[-1].files)

    def add_branch(self, name: str) -> None:
        """A branch at the newest commit."""
        self.content[f"refs/heads/{name}"] = f"{self.commits[-1]}\n".encode()

    def _object(self, kind: str, body: bytes) -> str:
        stored = f"{kind} {len(body)}\0".encode() + body
        name = hashlib.sha1(stored).hexdigest()
        self.content[f"objects/{name[:2]}/{name[2:]}"] = zlib.compress(stored)
        return name

    def _commit(self, commit: Commit, *, date_s: int) -> str:
        entries = (
            b"100644 " + path.encode() + b"\0" + bytes.fromhex(self._object("blob", commit.files[path]))
            for path in sorted(commit.files)
        )
        tree = self._object("tree", b"".join(entries))
        parents = "".join(f"parent {parent}\n" for parent in self.commits[-1:])
        signature = f"{AUTHOR} {date_s} +0000"
        text = f"tree {tree}\n{parents}author {signature}\ncommitter {signature}\n\n{commit.message}\n"
        return self._object("commit", text.encode())

    def _index(self, files: Mapping[str, bytes]) -> bytes:
        """Version 2, with all times zero: git then compares contents."""
        body = b"DIRC" + struct.pack(">LL", 2, len(files))
        for path in sorted(files):
            blob = bytes.fromhex(self._object("blob", files[path]))
            numbers = struct.pack(">10L", 0, 0, 0, 0, 0, 0, 0o100644, 0, 0, len(files[path]))
            entry = numbers + blob + struct.pack(">H", len(path)) + path.encode()
            body += entry + b"\0" * (8 - len(entry) % 8)
        return body + hashlib.sha1(body).digest()
