"""The tasks of a run: read from the folder that the config names, or generated once into the run's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from thundersyncrl.config import Config
from thundersyncrl.environments.harbor import load_tasks
from thundersyncrl.environments.shell_tasks import make_tasks
from thundersyncrl.errors import ConfigError
from thundersyncrl.records import Task

Split = Literal["train", "heldout"]


def task_set(config: Config, split: Split, generated: Path, announce: Callable[[str], None]) -> list[Task]:
    """Return the tasks of a split, of the kinds and difficulties that the config chooses.

    Args:
        generated: folder for the tasks of both splits, where the config names none. Made if it isn't there.
        announce: hears what takes a while.

    Raises:
        TaskError: a folder without tasks, or a task that can't be run here.
        ConfigError: no task of the chosen kinds and difficulties; or `generated` holds tasks of another origin.
    """
    settings = config.tasks
    given = settings.train if split == "train" else settings.heldout
    if not given:
        return load_tasks(_generated(config, split, generated, announce))
    folder = Path(given)
    tasks = load_tasks(folder, kinds=settings.kinds)
    chosen = [task for task in tasks if not settings.difficulties or task.difficulty in settings.difficulties]
    if not chosen:
        raise ConfigError(
            f"expected tasks of difficulty {', '.join(settings.difficulties)}, got none among {len(tasks)} ({folder}); "
            "choose others in `tasks.difficulties`"
        )
    return chosen


def _generated(config: Config, split: Split, base: Path, announce: Callable[[str], None]) -> Path:
    """Return the folder of generated tasks; those that a run with other settings left there are made anew."""
    settings = config.tasks
    num = settings.num_train if split == "train" else settings.num_heldout
    folder, stamp = base / split, base / f"{split}.json"
    origin = json.dumps(
        {"num": num, "seed": config.seed, "kinds": settings.kinds, "difficulties": settings.difficulties}
    )
    if stamp.exists() and folder.exists() and stamp.read_text(encoding="utf-8") == origin:
        return folder
    if folder.exists() and not stamp.exists():
        raise ConfigError(
            f"expected to generate tasks into {folder}, got a folder that isn't generated; name it in "
            f"`tasks.{split}`, or set another run with run=..."
        )
    announce(f"{num} {split} tasks in {folder}")
    part = base / f"{split}.part"
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    stamp.unlink(missing_ok=True)
    make_tasks(part, num=num, seed=config.seed, split=split, kinds=settings.kinds, difficulties=settings.difficulties)
    # In this order: a kill in between leaves tasks that are either whole with their stamp, or made again.
    stamp.write_text(origin, encoding="utf-8")
    part.rename(folder)
    return folder
