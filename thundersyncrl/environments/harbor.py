"""Read task folders in Harbor's format, and refuse what the shell sandbox can't give before anything runs.

| part             | what it is                                                                                  |
| ---------------- | ------------------------------------------------------------------------------------------- |
| `task.toml`      | limits, environment and metadata; `kind`, `difficulty`, `several_turns` in [metadata] are ours |
| `instruction.md` | what the agent reads                                                                        |
| `environment/`   | Dockerfile and what it copies; without a Dockerfile everything in here lies in /app          |
| `tests/test.sh`  | the verifier, which writes /logs/verifier/reward.txt or reward.json                          |
| `solution/`      | solve.sh, the oracle; only needed to run it                                                  |

Source: Harbor, task format, schema version 1.4 (https://www.harborframework.com/docs/tasks). Older spellings are
read too.
"""

from __future__ import annotations

import itertools
import math
import os
import posixpath
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from thundersyncrl.environments.dockerfile import PLAIN_IMAGES, Build, Copy, is_plain_image, read_dockerfile
from thundersyncrl.environments.plain_file import read_plain_text
from thundersyncrl.environments.sandbox import RESERVED
from thundersyncrl.errors import TaskError
from thundersyncrl.records import Task

DEFAULT_WORKDIR = "/app"

_PARTS = ("task.toml", "instruction.md", "environment", "tests/test.sh")
_COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")

# Network modes that a sandbox without network satisfies; an absent mode asks for nothing.
_NO_NETWORK = ("no-network", "none", "")

# Asked for by a task, these change what it is; the value is what makes the request empty.
_REFUSED: Mapping[str, Mapping[str, str]] = {
    "": {"steps": "several steps with a verdict each", "multi_step_reward_strategy": "several steps"},
    "environment": {
        "gpus": "a GPU",
        "gpu_types": "a GPU",
        "tpu": "a TPU",
        "mcp_servers": "tool servers",
        "skills_dir": "skills",
        "healthcheck": "a service that is waited for",
        "privileged": "privileges",
    },
    "agent": {"user": "a user of its own"},
    "verifier": {
        "user": "a user of its own",
        "collect": "commands that collect files",
        "environment": "an environment of its own",
    },
}
_MAX_NUMBER = 1e12  # more seconds or megabytes than there are
_MEGABYTES = {"k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0 * 1024.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A task folder, read. Limits that the task doesn't set are infinite."""

    folder: Path
    instruction: str
    kind: str
    difficulty: str
    several_turns: bool
    workdir: str
    variables: Mapping[str, str]
    """Environment variables of every command."""
    copies: tuple[Copy, ...]
    """What lies in the world at the start."""
    made_folders: tuple[str, ...]
    top_folders: tuple[str, ...]
    """Every top folder that the task's own files lie in, such as "/app"."""
    agent_limit_s: float
    verifier_limit_s: float
    verifier_variables: Mapping[str, str]
    solution_variables: Mapping[str, str]
    memory_bytes: float
    disk_bytes: float

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def solution(self) -> Path:
        return self.folder / "solution"


def load_task(folder: Path) -> Task:
    """Return the task of one folder; its id is the folder's name.

    Raises:
        TaskError: a part is missing or unreadable, or it asks for what the sandbox can't give.
    """
    found = read_task(folder)
    return Task(
        id=folder.name,
        instruction=found.instruction,
        folder=folder,
        kind=found.kind,
        difficulty=found.difficulty,
        several_turns=found.several_turns,
    )


def load_tasks(root: Path, *, kinds: Sequence[str] = ()) -> list[Task]:
    """Return the tasks below `root`, sorted by id. Folders may be grouped in folders.

    Args:
        kinds: only these; empty takes all.

    Raises:
        TaskError: as `load_task`; no tasks; two with the same id; a kind that no task is of.
    """
    if not os.path.isdir(root):  # unlike Path.is_dir, also False for a name that is too long
        raise TaskError(f"expected a folder of task folders, got none at {root}; check the path")
    tasks = sorted((load_task(folder) for folder in _task_folders(root, ())), key=lambda task: task.id)
    if not tasks:
        raise TaskError(f"expected task folders (with task.toml), got none below {root}; check the path")
    for first, second in itertools.pairwise(tasks):
        if first.id == second.id:
            raise TaskError(
                f"expected folder names to be unique, got {first.id!r} at {first.folder} and {second.folder}; "
                "rename one"
            )
    known = sorted({task.kind for task in tasks})
    for kind in kinds:
        if kind not in known:
            raise TaskError(f"expected a kind of {known}, got {kind!r} ({root}); correct `tasks.kinds`")
    return [task for task in tasks if not kinds or task.kind in kinds]


def _task_folders(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Give the task folders below `folder`; a link back to one of those `above` is left out."""
    here = folder.resolve()
    if here in above:
        return
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise TaskError(f"expected a folder that can be read, got {error}") from error
    for child in children:
        if not child.is_dir() or child.name.startswith("."):
            continue
        if any((child / part).exists() for part in _PARTS):
            yield child
        else:
            yield from _task_folders(child, (*above, here))


def read_task(folder: Path) -> HarborTask:
    """Return everything that a task folder says; raises as `load_task`."""
    for part in _PARTS:
        place = folder / part
        if not (place.is_dir() if part == "environment" else place.exists() and not place.is_dir()):
            raise TaskError(
                f"expected `{part}` in the task folder, got none of that kind ({folder}); add it or remove the task"
            )
    settings = _Table(_read_toml(folder / "task.toml"), f"{folder / 'task.toml'}")
    _check_version(settings)
    _check_possible(folder, settings)
    metadata = settings.table("metadata")
    environment = settings.table("environment")
    build = _read_build(folder / "environment")
    _check_targets(folder, build)
    workdir = environment.path("workdir") or build.workdir
    paths = [*build.folders, *(copy.target for copy in build.copies), workdir]
    return HarborTask(
        folder=folder,
        instruction=_read_text(folder / "instruction.md").strip(),
        kind=metadata.text("kind") or metadata.text("category"),
        difficulty=metadata.text("difficulty"),
        several_turns=metadata.flag("several_turns"),
        workdir=DEFAULT_WORKDIR if workdir == "/" else workdir,
        variables={**build.variables, **environment.variables("env")},
        copies=build.copies,
        made_folders=build.folders,
        top_folders=tuple(dict.fromkeys(_top_folder(path, folder) for path in paths if path != "/")),
        agent_limit_s=settings.table("agent").number("timeout_sec"),
        verifier_limit_s=settings.table("verifier").number("timeout_sec"),
        verifier_variables=settings.table("verifier").variables("env"),
        solution_variables=settings.table("solution").variables("env"),
        memory_bytes=environment.megabytes("memory_mb", "memory") * 2**20,
        disk_bytes=environment.megabytes("storage_mb", "storage") * 2**20,
    )


def _read_text(file: Path) -> str:
    text = read_plain_text(file)
    if not text.strip():
        raise TaskError(f"expected text, got an empty file ({file}); say what the agent is to do")
    return text


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_plain_text(file))
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and deep nesting
        raise TaskError(f"expected TOML, got {error} ({file})") from error


def _read_build(environment: Path) -> Build:
    if not environment.resolve().is_relative_to(environment.parent.resolve()):
        raise TaskError(f"expected `environment` inside of the task folder, got a link out of it ({environment})")
    for name in _COMPOSE_FILES:
        if (environment / name).exists():
            raise TaskError(
                f"expected a single container, got `{name}` ({environment}); the shell sandbox runs no services"
            )
    if (environment / ".dockerignore").exists():
        raise TaskError(f"expected no `.dockerignore`, got one ({environment}); remove it and what it leaves out")
    file = environment / "Dockerfile"
    if file.exists():
        try:
            return read_dockerfile(file)
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"expected a readable Dockerfile, got {error} ({file})") from error
    return Build(workdir=DEFAULT_WORKDIR, copies=(Copy(source=environment, target=DEFAULT_WORKDIR),))


def _check_version(settings: _Table) -> None:
    version = settings.text("schema_version") or settings.text("version") or "1"
    if version.split(".")[0] != "1":
        raise TaskError(f"expected `schema_version` 1.x, got {version!r} ({settings.where})")


def _check_possible(folder: Path, settings: _Table) -> None:
    """Refuse what a sandbox without images, network, GPU, services and privileges can't give."""
    for name, keys in _REFUSED.items():
        table = settings.table(name) if name else settings
        for key, meaning in keys.items():
            if table.value(key):
                raise table.refusal(key, f"no `{key}`: the shell sandbox can't give {meaning}")
    environment = settings.table("environment")
    for table in (environment, settings.table("agent"), settings.table("verifier")):
        mode = table.text("network_mode")
        if mode.lower() not in _NO_NETWORK:
            raise table.refusal("network_mode", '"no-network": the shell sandbox has no network')
    if environment.flag("allow_internet"):
        raise environment.refusal("allow_internet", "false: the shell sandbox has no network")
    if settings.table("verifier").text("environment_mode") not in ("", "shared"):
        raise settings.table("verifier").refusal("environment_mode", '"shared": there is one sandbox per trajectory')
    if environment.text("os").lower() not in ("", "linux"):
        raise environment.refusal("os", '"linux"')
    image = environment.text("docker_image")
    has_dockerfile = (folder / "environment" / "Dockerfile").exists()
    if image and not has_dockerfile and not is_plain_image(image):
        raise environment.refusal(
            "docker_image", f"a plain image ({', '.join(PLAIN_IMAGES)}): the sandbox shows this machine's programs"
        )


def _check_targets(folder: Path, build: Build) -> None:
    for copy in build.copies:
        if copy.target == "/" or (copy.target.count("/") == 1 and not copy.source.is_dir()):
            raise TaskError(
                f"expected files to be copied into a folder such as {DEFAULT_WORKDIR}, got {copy.source.name!r} to "
                f"{copy.target!r} ({folder}); set WORKDIR, or end the target with a slash"
            )


def _top_folder(path: str, folder: Path) -> str:
    top = "/" + path.lstrip("/").partition("/")[0]
    if top in RESERVED:
        raise TaskError(
            f"expected the task's files outside of {', '.join(sorted(RESERVED))}, got {path!r} ({folder}); "
            "the shell sandbox keeps these for the system and the verifier"
        )
    return top


class _Table:
    """A table of task.toml with typed access; a wrong type is an error that names the key."""

    def __init__(self, values: dict[str, Any], where: str, name: str = "") -> None:
        self._values = values
        self._name = name
        self.where = where

    def refusal(self, key: str, expected: str) -> TaskError:
        dotted = f"{self._name}.{key}" if self._name else key
        return TaskError(f"expected `{dotted}` to be {expected}, got {self._values.get(key)!r} ({self.where})")

    def value(self, key: str) -> object:
        return self._values.get(key)

    def table(self, key: str) -> _Table:
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise self.refusal(key, "a table")
        return _Table(cast(dict[str, Any], value), self.where, key)

    def text(self, key: str) -> str:
        value = self._values.get(key, "")
        if not isinstance(value, str):
            raise self.refusal(key, "text")
        return value

    def flag(self, key: str) -> bool:
        value = self._values.get(key, False)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def number(self, key: str) -> float:
        """Return a positive number; infinity when it isn't there."""
        value = self._values.get(key, math.inf)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value < _MAX_NUMBER or value == math.inf):
            raise self.refusal(key, f"a positive number below {_MAX_NUMBER:g}")
        return float(value)

    def path(self, key: str) -> str:
        """Return an absolute path without detours; empty when it isn't there."""
        value = self.text(key)
        path = posixpath.normpath(value) if value else ""
        if value and (not value.startswith("/") or "\0" in value or ".." in value.split("/")):
            raise self.refusal(key, "an absolute path without `..`")
        return f"/{path.lstrip('/')}" if path else ""

    def megabytes(self, key: str, older: str) -> float:
        """Return a size in MiB, from a number or from an older text such as "2G"; infinity when it isn't there."""
        if key in self._values or older not in self._values:
            size = self.number(key)
        else:
            text, key = self.text(older).strip().lower().rstrip("ib"), older
            try:
                size = float(text[:-1]) * _MEGABYTES[text[-1:]]
            except (ValueError, KeyError):
                raise self.refusal(older, 'a size such as "512M" or "2G"') from None
        if not size >= 1:  # a tmpfs of size 0 is one without limit
            raise self.refusal(key, "at least one megabyte")
        return size

    def variables(self, key: str) -> dict[str, str]:
        """Return environment variables; a reference to one of this machine's is refused."""
        for name, value in self.table(key)._values.items():
            if not isinstance(value, str):
                raise self.refusal(key, f"texts (`{name}`)")
            if not name or "=" in name or "\0" in name + value:
                raise self.refusal(key, f"variables that a program can be given (`{name[:40]}`)")
            if "${" in value:
                raise self.refusal(key, f"without reference to this machine's variables (`{name}`)")
        return dict(self.table(key)._values)
