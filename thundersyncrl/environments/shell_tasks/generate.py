"""Writes shell tasks as Harbor folders, the same ones for the same seed.

A task is for training or held out by a hash of its solution, so that no solution is ever in both, whatever
the seeds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from random import Random
from typing import Final, Literal, get_args

from thundersyncrl.environments.shell_tasks.catalog import KINDS
from thundersyncrl.environments.shell_tasks.checks import verifier
from thundersyncrl.environments.shell_tasks.scene import DIFFICULTIES, Difficulty, ShellTask
from thundersyncrl.environments.shell_tasks.words import Draw
from thundersyncrl.errors import ConfigError, TaskError
from thundersyncrl.records import Task

Split = Literal["train", "heldout"]

HELDOUT_SHARE: Final = 0.25
"""Of all solutions that can be drawn."""
MAX_DRAWS: Final = 2000
"""Draws for one task before its kind and difficulty count as used up."""
TURNS_FILE: Final = Path("solution", "turns.json")


def make_tasks(
    folder: Path,
    *,
    num: int,
    seed: int,
    split: Split,
    kinds: Sequence[str] = (),
    difficulties: Sequence[str] = (),
) -> list[Path]:
    """Writes `num` different tasks into `folder`, evenly over kinds and difficulties; returns their folders.

    Args:
        folder: made if it isn't there. Tasks of the same call are written over; others may not lie in it.
        kinds: names in `KINDS`; all of them if empty.
        difficulties: "easy", "medium" or "hard"; all of them if empty.

    Raises:
        ConfigError: an unknown kind, difficulty or split, no task wanted, more tasks than there are, or a
            folder that holds something else.
    """
    _check_choice("split", [split], get_args(Split))
    _check_choice("kind", kinds, list(KINDS))
    _check_choice("difficulty", difficulties, DIFFICULTIES)
    if num < 1:
        raise ConfigError(f"expected at least one task, got num={num} (make_tasks); ask for 1 or more")
    chosen: list[Difficulty] = [
        difficulty for difficulty in DIFFICULTIES if not difficulties or difficulty in difficulties
    ]
    tasks = _draw_different(num, seed=seed, split=split, kinds=sorted(set(kinds or KINDS)), difficulties=chosen)
    written = {task_id(task): task for task in tasks}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in written)
    except OSError as error:
        raise ConfigError(f"expected a folder that can be written, got {error}; choose another") from error
    if foreign:
        raise ConfigError(
            f"expected a folder for these tasks only, got {len(foreign)} other entries such as "
            f"{foreign[0]!r} ({folder}); choose an empty folder"
        )
    return [write_task(task, folder / name, split=split) for name, task in written.items()]


def draw_task(kind: str, difficulty: Difficulty, *, seed: int | str) -> ShellTask:
    """One task of a kind, the same one for the same seed.

    Example:
        >>> draw_task("make", "easy", seed=1) == draw_task("make", "easy", seed=1)
        True
    """
    draw = Draw(Random(f"{kind}/{difficulty}/{seed}"))
    return ShellTask(kind=kind, difficulty=difficulty, scene=draw.one_of(KINDS[kind][difficulty])(draw))


def split_of(task: ShellTask) -> Split:
    """Whether a task is for training or held out; it depends on the oracle's commands alone."""
    digest = hashlib.sha256("\n".join(task.scene.commands).encode()).digest()
    return "heldout" if int.from_bytes(digest[:4]) < HELDOUT_SHARE * 2**32 else "train"


def task_id(task: ShellTask) -> str:
    """Kind, difficulty and a hash of all that the task's folder holds."""
    digest = hashlib.sha256()
    for path, content in sorted(_written_files(task, split_of(task)).items()):
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    digest.update(repr((task.scene.folders, sorted(task.scene.modes.items()))).encode())
    return f"{task.kind}-{task.difficulty}-{digest.hexdigest()[:10]}"


def write_task(task: ShellTask, folder: Path, *, split: Split) -> Path:
    """Writes one Harbor task folder, in place of what was there, and returns it."""
    shutil.rmtree(folder, ignore_errors=True)
    world = folder / "environment" / "files"
    # Permissions are part of the task, so they must not depend on the umask.
    for name in ("", *task.scene.folders):
        _make_folders(world, name)
    for path, content in _written_files(task, split).items():
        _make_folders(folder, str(Path(path).parent))
        (folder / path).write_bytes(content)
        (folder / path).chmod(0o644)
    for path, mode in task.scene.modes.items():
        (world / path).chmod(mode)
    return folder


def oracle_turns(task: Task) -> list[str]:
    """The action texts of the oracle's transcript, as a model would write them; no agent sees this file.

    Raises:
        TaskError: the task has no folder, or its folder has no transcript.
    """
    if task.folder is None or not (task.folder / TURNS_FILE).is_file():
        raise TaskError(
            f"expected an oracle's transcript in {TURNS_FILE}, got none ({task.folder or task.id}); "
            "make the tasks with `make_tasks`, or leave this one out of the warm start"
        )
    return [str(text) for text in json.loads((task.folder / TURNS_FILE).read_text())]


def _draw_different(
    num: int, *, seed: int, split: Split, kinds: Sequence[str], difficulties: Sequence[Difficulty]
) -> list[ShellTask]:
    """Tasks of which no two ask for the same in the same words, in rounds over all kinds and difficulties."""
    order = Random(f"{seed}/{split}/order")
    cells: list[tuple[str, Difficulty]] = [(kind, difficulty) for kind in kinds for difficulty in difficulties]
    streams = {cell: _draw_split(cell[0], cell[1], seed=seed, split=split) for cell in cells}
    seen: set[tuple[str, ...]] = set()
    tasks: list[ShellTask] = []
    while len(tasks) < num:
        for cell in order.sample(cells, min(len(cells), num - len(tasks))):
            for task in (next(streams[cell]) for _ in range(MAX_DRAWS)):
                if (key := (task.scene.instruction, *task.scene.commands)) not in seen:
                    break
            else:
                raise ConfigError(
                    f"expected {num} different tasks, got {len(tasks)}: {cell[1]} tasks of kind {cell[0]!r} "
                    f"are used up (split {split!r}); ask for fewer, or for more kinds or difficulties"
                )
            seen.add(key)
            tasks.append(task)
    return tasks


def _draw_split(kind: str, difficulty: Difficulty, *, seed: int, split: Split) -> Iterator[ShellTask]:
    """All draws that belong to the split, without end."""
    attempt = 0
    while True:
        task = draw_task(kind, difficulty, seed=f"{seed}/{attempt}")
        if split_of(task) == split:
            yield task
        attempt += 1


def _written_files(task: ShellTask, split: Split) -> Mapping[str, bytes]:
    """Every file of the task's folder, by its path in there."""
    scene = task.scene
    texts = {
        "task.toml": _task_toml(task, split),
        "instruction.md": f"{scene.instruction}\n",
        "environment/Dockerfile": _dockerfile(task),
        "tests/test.sh": verifier(scene.conditions),
        "solution/solve.sh": "\n".join(["#!/bin/bash", "cd /app || exit 1", *scene.commands, ""]),
        str(TURNS_FILE): json.dumps(task.actions, indent=2) + "\n",
    }
    world = {f"environment/files/{path}": content for path, content in scene.files.items()}
    # Not under the name `.git`: the folder of tasks may itself lie in a repository.
    repository = {f"environment/git/{path}": content for path, content in scene.repository.items()}
    return {**{path: text.encode() for path, text in texts.items()}, **world, **repository}


def _task_toml(task: ShellTask, split: Split) -> str:
    return f"""schema_version = "1.4"

[metadata]
kind = "{task.kind}"
difficulty = "{task.difficulty}"
several_turns = {str(task.several_turns).lower()}
split = "{split}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
cpus = 1
memory_mb = 512
network_mode = "no-network"
"""


def _dockerfile(task: ShellTask) -> str:
    variables = [f"ENV {name}={value}" for name, value in task.scene.variables.items()]
    repository = ["COPY git/ /app/.git/"] if task.scene.repository else []
    return "\n".join([f"FROM {task.scene.image}", *variables, "WORKDIR /app", "COPY files/ /app/", *repository, ""])


def _make_folders(root: Path, path: str) -> None:
    """Makes the folder and those above it up to the root, each with mode 755."""
    root.mkdir(parents=True, exist_ok=True)
    for part in reversed([Path(path), *Path(path).parents]):
        (root / part).mkdir(exist_ok=True)
        os.chmod(root / part, 0o755)


def _check_choice(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"
            raise ConfigError(f"expected a known {what}, got {name!r} (make_tasks); {hint}")
