"""A generator of shell tasks: real files and tools, strict verifiers, and each oracle's transcript."""

from thundersyncrl.environments.shell_tasks.catalog import KINDS, QUICKSTART_KINDS
from thundersyncrl.environments.shell_tasks.generate import (
    draw_task,
    make_tasks,
    oracle_turns,
    split_of,
    task_id,
    write_task,
)
from thundersyncrl.environments.shell_tasks.scene import DIFFICULTIES, Scene, ShellTask

__all__ = [
    "DIFFICULTIES",
    "KINDS",
    "QUICKSTART_KINDS",
    "Scene",
    "ShellTask",
    "draw_task",
    "make_tasks",
    "oracle_turns",
    "split_of",
    "task_id",
    "write_task",
]
