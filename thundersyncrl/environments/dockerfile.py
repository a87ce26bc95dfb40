"""Read the few Dockerfile instructions that a sandbox can carry out, and refuse every other by name.

Supported: one FROM of a plain Debian, Ubuntu or Python image (the sandbox shows this machine's own programs
instead), WORKDIR, ENV, COPY without flags out of the build context, and RUN of `mkdir -p` and of `apt-get
install` where this machine has the programs. A task's files then are the same as in its container.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from thundersyncrl.environments.isolation import SEARCH_PATH
from thundersyncrl.environments.plain_file import read_plain_text
from thundersyncrl.errors import TaskError

PLAIN_IMAGES = ("debian", "ubuntu", "python")

# Packages whose program has another name; without an entry it has the package's own.
_PROGRAMS = {
    "build-essential": "gcc",
    "coreutils": "ls",
    "diffutils": "diff",
    "findutils": "find",
    "procps": "ps",
    "util-linux": "flock",
    "xz-utils": "xz",
}

_NOT_A_NAME = re.compile(r"^-|[|&<>()`*?~\[]")
"""An option, or what a shell would give a meaning."""

_IMAGE = re.compile(r"(?:docker\.io/)?(?:library/)?(?P<name>[a-z0-9._/-]+)(?::[A-Za-z0-9._-]+)?(?:@sha256:[0-9a-f]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One source of a COPY instruction."""

    source: Path
    """A file or folder of the build context."""
    target: str
    """Absolute path in the world: of the file itself, or of the folder that receives what the source holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What the Dockerfile's instructions amount to."""

    workdir: str = "/"
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    copies: tuple[Copy, ...] = ()
    folders: tuple[str, ...] = ()
    """Folders that WORKDIR and `mkdir -p` make."""


def is_plain_image(name: str) -> bool:
    """Return whether an image is one whose programs any Linux machine can stand in for.

    Example:
        >>> is_plain_image("python:3.12-slim"), is_plain_image("postgres:16"), is_plain_image("me/debian")
        (True, False, False)
    """
    match = _IMAGE.fullmatch(name)
    return match is not None and match["name"] in PLAIN_IMAGES


def read_dockerfile(file: Path) -> Build:
    """Return what a Dockerfile asks for; its folder is the build context.

    Raises:
        TaskError: an instruction that the sandbox can't carry out, named with its line.
    """
    reader = _Reader(file)
    content = read_plain_text(file)
    if "\0" in content:
        raise TaskError(f"expected a Dockerfile of text, got a NUL character ({file})")
    for number, text in _instructions(content):
        reader.carry_out(number, text)
    return reader.finish()


def _instructions(text: str) -> list[tuple[int, str]]:
    """Return (line number, instruction) with comments dropped and continued lines joined."""
    found: list[tuple[int, str]] = []
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        start = start or number
        if stripped.endswith("\\"):
            pending += stripped[:-1] + " "
            continue
        found.append((start, pending + stripped))
        pending, start = "", 0
    return [*found, (start, pending.strip())] if pending.strip() else found


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


class _Reader:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._context = file.parent
        self._num_images = 0
        self._workdir = "/"
        self._variables: dict[str, str] = {}
        self._copies: list[Copy] = []
        self._folders: list[str] = []

    def _refuse(self, number: int, expected: str, got: str) -> TaskError:
        return TaskError(f"expected {expected}, got {got} ({self._file}, line {number})")

    def carry_out(self, number: int, text: str) -> None:
        keyword, _, rest = text.partition(" ")
        keyword, rest = keyword.upper(), rest.strip()
        if keyword == "FROM":
            self._from(number, rest)
        elif self._num_images == 0:
            raise self._refuse(number, "a Dockerfile to begin with FROM", f"`{text[:60]}`")
        elif keyword == "WORKDIR":
            self._workdir = self._absolute(self._fill(number, _unquoted(rest)))
            self._folders.append(self._workdir)
        elif keyword == "ENV":
            self._env(number, rest)
        elif keyword == "COPY":
            self._copy(number, rest)
        elif keyword == "RUN":
            self._run(number, rest)
        else:
            raise self._refuse(
                number,
                "only FROM, WORKDIR, ENV, COPY and RUN, which the shell sandbox can carry out",
                f"`{text[:60]}`; put what it makes into the build context and COPY it, or leave this task out",
            )

    def _from(self, number: int, rest: str) -> None:
        words = rest.split()
        self._num_images += 1
        if self._num_images > 1:
            raise self._refuse(number, "one FROM", "a second build stage, which the sandbox has no use for")
        is_named = len(words) == 3 and words[1].upper() == "AS"
        if not words or not is_plain_image(words[0]) or not (len(words) == 1 or is_named):
            raise self._refuse(
                number,
                f"a plain image ({', '.join(PLAIN_IMAGES)}), since the sandbox shows this machine's own programs",
                f"`FROM {rest}`",
            )

    def _env(self, number: int, rest: str) -> None:
        words = self._split(number, rest)
        if words and "=" not in words[0]:  # the old form `ENV name value`
            name, _, value = rest.partition(" ")
            words = [f"{name}={_unquoted(value.strip())}"]
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise self._refuse(number, "`ENV name=value`", f"`ENV {rest[:60]}`")
            self._variables[name] = self._fill(number, value)

    def _copy(self, number: int, rest: str) -> None:
        words = self._words_of_copy(number, rest)
        if len(words) < 2 or any(word.startswith("--") or word.startswith("<<") for word in words):
            raise self._refuse(number, "`COPY source ... target` without flags", f"`COPY {rest[:60]}`")
        *patterns, target = (self._fill(number, word) for word in words)
        sources = [source for pattern in patterns for source in self._sources(number, pattern)]
        is_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
        where = self._absolute(target)
        for source in sources:
            into = posixpath.join(where, source.name) if is_folder and not source.is_dir() else where
            self._copies.append(Copy(source=source, target=into))

    def _run(self, number: int, rest: str) -> None:
        for words in self._commands(number, rest):
            match words:
                case ["apt-get" | "apt", *options]:
                    self._apt(number, [option for option in options if not option.startswith("-")])
                case ["rm", "-rf" | "-r" | "-fr", "/var/lib/apt/lists/*"]:
                    pass  # there are none
                case ["mkdir", "-p", *folders] if folders and not any(map(_NOT_A_NAME.search, folders)):
                    self._folders += [self._absolute(self._fill(number, folder)) for folder in folders]
                case _:
                    raise self._refuse(
                        number,
                        "only `mkdir -p` and `apt-get install` in RUN, since the sandbox builds no images",
                        f"`RUN {rest[:60]}`; put what it makes into the build context and COPY it, or leave "
                        "this task out",
                    )

    def _commands(self, number: int, text: str) -> list[list[str]]:
        """Return the words of each command of a RUN line, without leading assignments."""
        commands: list[list[str]] = [[]]
        try:
            lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError as error:
            raise self._refuse(number, "words with matching quotes", f"`{text[:60]}` ({error})") from error
        for word in words:
            if word in ("&&", ";"):
                commands.append([])
            elif commands[-1] or not re.fullmatch(r"[A-Z_]+=\w*", word):
                commands[-1].append(word)
        return commands

    def _apt(self, number: int, words: list[str]) -> None:
        """Accept an installation whose programs this machine has already."""
        if words in (["update"], ["clean"]):
            return
        if words[:1] != ["install"]:
            raise self._refuse(number, "`apt-get update`, `install` or `clean`", f"`apt-get {' '.join(words)[:60]}`")
        for package in words[1:]:
            program = _PROGRAMS.get(package, package)
            if shutil.which(program, path=SEARCH_PATH) is None:
                raise self._refuse(
                    number,
                    f"the program `{program}` on this machine, since the sandbox installs nothing",
                    f"none; install the system package `{package}`, or leave this task out",
                )

    def _words_of_copy(self, number: int, rest: str) -> list[str]:
        if not rest.startswith("["):
            return self._split(number, rest)
        try:
            words: object = json.loads(rest)
        except ValueError:
            words = None
        if not isinstance(words, list) or not all(isinstance(w, str) for w in cast(list[object], words)):
            raise self._refuse(number, "a JSON list of strings", f"`COPY {rest[:60]}`")
        return cast(list[str], words)

    def _sources(self, number: int, pattern: str) -> list[Path]:
        relative = posixpath.normpath(pattern.lstrip("/") or ".")
        if relative.startswith(".."):
            raise self._refuse(number, "sources inside of the build context", f"`{pattern}`")
        try:
            found = [self._context] if relative == "." else sorted(self._context.glob(relative))
        except ValueError as error:
            raise self._refuse(number, "a pattern of file names", f"`{pattern}` ({error})") from error
        root = self._context.resolve()
        if not found:
            raise self._refuse(number, f"`{pattern}` in {self._context}", "no such file")
        for source in found:
            if not source.resolve().is_relative_to(root):
                raise self._refuse(number, "sources inside of the build context", f"a link out of it: {source}")
        return found

    def _split(self, number: int, text: str) -> list[str]:
        try:
            return shlex.split(text)
        except ValueError as error:
            raise self._refuse(number, "words with matching quotes", f"`{text[:60]}` ({error})") from error

    def _fill(self, number: int, text: str) -> str:
        """Put in variables that ENV has set; a name without value is an error rather than an empty text."""

        def value(match: re.Match[str]) -> str:
            name = match["braced"] or match["bare"]
            if name not in self._variables:
                raise self._refuse(number, "only variables set by ENV before", f"`{match.group()}`")
            return self._variables[name]

        return re.sub(r"\$\{(?P<braced>[A-Za-z_]\w*)\}|\$(?P<bare>[A-Za-z_]\w*)", value, text)

    def _absolute(self, path: str) -> str:
        # POSIX keeps two leading slashes apart from one; Linux doesn't.
        return "/" + posixpath.normpath(posixpath.join(self._workdir, path)).lstrip("/")

    def finish(self) -> Build:
        if self._num_images == 0:
            raise TaskError(f"expected a Dockerfile with FROM, got none ({self._file}); add one, or remove the file")
        return Build(
            workdir=self._workdir,
            variables=self._variables,
            copies=tuple(self._copies),
            folders=tuple(self._folders),
        )
