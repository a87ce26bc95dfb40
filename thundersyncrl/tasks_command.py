"""The commands under `tasks`: make, check and list task folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from thundersyncrl.command_options import EXIT_CONFIG, AsJson, print_json
from thundersyncrl.config import EnvironmentConfig

tasks_app = typer.Typer(help="Make, check and list task folders.", no_args_is_help=True, rich_markup_mode=None)

TaskFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of task folders.", show_default=False)]


@tasks_app.command("make")
def make_tasks_command(
    folder: TaskFolder,
    num: Annotated[int, typer.Option(min=1, help="Different tasks to make.")] = 240,
    seed: Annotated[int, typer.Option(help="The same seed makes the same tasks.")] = 0,
    split: Annotated[str, typer.Option(help='"train" or "heldout"; no task is ever in both.')] = "train",
    kinds: Annotated[str, typer.Option(help="Such as copy,git; all kinds without it.")] = "",
    difficulties: Annotated[str, typer.Option(help="Of easy,medium,hard; all without it.")] = "",
) -> None:
    """Write shell tasks as Harbor folders, evenly over kinds and difficulties.

    \b
    Example:
        thundersyncrl tasks make tasks/train --num 240 --split train --kinds copy,move
    """
    from thundersyncrl.environments.shell_tasks import make_tasks

    chosen = cast(Any, split)  # make_tasks refuses every other split by name
    made = make_tasks(
        folder, num=num, seed=seed, split=chosen, kinds=_listed(kinds), difficulties=_listed(difficulties)
    )
    print(f"made {len(made)} tasks in {folder}", flush=True)


@tasks_app.command("check")
def check_tasks_command(
    folder: TaskFolder,
    oracle: Annotated[bool, typer.Option("--oracle", help="Also run each task's solution in the sandbox.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every task of a folder, and with --oracle see that its own solution gets reward 1.

    \b
    Example:
        thundersyncrl tasks check tasks/train --oracle
    """
    from thundersyncrl.check import check_oracles, describe_tasks
    from thundersyncrl.environments.harbor import load_tasks

    tasks = load_tasks(folder)
    print(describe_tasks(tasks), file=sys.stderr if as_json else sys.stdout, flush=True)

    def progress(done: int) -> None:
        if done % 50 == 0:
            print(f"  {done} of {len(tasks)} solutions run", file=sys.stderr, flush=True)

    failed = [f for f in check_oracles(tasks, EnvironmentConfig(), progress) if not f.ok] if oracle else []
    for finding in failed:
        print(finding.line(), file=sys.stderr, flush=True)
    if as_json:
        print_json({"tasks": len(tasks), "failed": [finding.to_json() for finding in failed]})
    elif oracle:
        print(f"{len(tasks) - len(failed)} of {len(tasks)} solutions get reward 1", flush=True)
    if failed:
        raise typer.Exit(EXIT_CONFIG)


@tasks_app.command("list")
def list_tasks_command(folder: TaskFolder, as_json: AsJson = False) -> None:
    """List the tasks of a folder: id, kind, difficulty, and whether they need several turns.

    \b
    Example:
        thundersyncrl tasks list tasks/train
    """
    from thundersyncrl.environments.harbor import load_tasks

    tasks = load_tasks(folder)
    if as_json:
        keys = ("id", "kind", "difficulty", "several_turns", "instruction")
        print_json({"tasks": [{key: getattr(task, key) for key in keys} for task in tasks]})
        return
    for task in tasks:
        turns = "several turns" if task.several_turns else "one turn"
        print(f"{task.id}\t{task.kind}\t{task.difficulty}\t{turns}", flush=True)


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
