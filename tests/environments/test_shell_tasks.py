"""The generated shell tasks: different, split cleanly, solved by their oracle and by nothing cheaper."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from thundersyncrl.config import EnvironmentConfig
from thundersyncrl.environments.harbor import load_task
from thundersyncrl.environments.shell import ShellEnvironment, run_oracle
from thundersyncrl.environments.shell_tasks import (
    DIFFICULTIES,
    KINDS,
    QUICKSTART_KINDS,
    ShellTask,
    draw_task,
    make_tasks,
    oracle_turns,
    split_of,
    task_id,
    write_task,
)
from thundersyncrl.environments.shell_tasks.scene import Difficulty
from thundersyncrl.environments.shell_tasks.words import Draw
from thundersyncrl.errors import ConfigError, TaskError
from thundersyncrl.records import Task

CELLS = [(kind, difficulty) for kind in KINDS for difficulty in DIFFICULTIES]
SETTINGS = EnvironmentConfig()


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_tasks(tmp_path_factory.mktemp("train"), num=400, seed=1, split="train")


@pytest.fixture(scope="module")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_tasks(tmp_path_factory.mktemp("heldout"), num=120, seed=1, split="heldout")


def every_variant(kind: str, difficulty: Difficulty, *, seed: int) -> list[ShellTask]:
    """One task of each variant that the kind has at this difficulty."""
    return [
        ShellTask(kind=kind, difficulty=difficulty, scene=variant(Draw(Random(f"{seed}/{number}"))))
        for number, variant in enumerate(KINDS[kind][difficulty])
    ]


def written(task: ShellTask, root: Path) -> Task:
    return load_task(write_task(task, root / task_id(task), split=split_of(task)))


def what_it_is(folder: Path) -> str:
    """A hash of all that makes this task differ from another: the world, the instruction, the verifier."""
    digest = hashlib.sha256()
    for part in ("instruction.md", "environment", "tests"):
        for path in [folder / part, *sorted((folder / part).rglob("*"))]:
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def metadata(folder: Path) -> dict[str, object]:
    return tomllib.loads((folder / "task.toml").read_text())["metadata"]


def solution(folder: Path) -> str:
    return (folder / "solution" / "solve.sh").read_text()


def block(command: str) -> str:
    return f"```bash\n{command}\n```\nDONE"


def reward(task: Task, actions: Sequence[str]) -> float:
    """The verdict on a world in which an agent did this."""

    async def play() -> float:
        environment = ShellEnvironment(task, SETTINGS, asyncio.Semaphore(1))
        try:
            await environment.open()
            for action in actions:
                observation = await environment.act(action)
                assert not observation.is_malformed
            return (await environment.grade()).value
        finally:
            await environment.close()

    return asyncio.run(play())


# the set


def test_tasks_are_many_and_different(train: list[Path], heldout: list[Path]) -> None:
    assert (len(train), len(heldout)) == (400, 120)
    for folders in (train, heldout):
        assert len({what_it_is(folder) for folder in folders}) == len(folders)
        assert len({folder.name for folder in folders}) == len(folders)


def test_no_task_no_id_and_no_solution_is_in_both_splits(train: list[Path], heldout: list[Path]) -> None:
    for view in (what_it_is, solution, lambda folder: folder.name):
        assert not {view(folder) for folder in train} & {view(folder) for folder in heldout}


def test_splits_stay_apart_whatever_the_seeds(tmp_path: Path) -> None:
    train = make_tasks(tmp_path / "train", num=108, seed=3, split="train")
    heldout = make_tasks(tmp_path / "heldout", num=108, seed=4, split="heldout")
    assert not {solution(folder) for folder in train} & {solution(folder) for folder in heldout}


def test_all_kinds_and_difficulties_come_evenly(train: list[Path]) -> None:
    counts = dict.fromkeys(CELLS, 0)
    for folder in train:
        counts[metadata(folder)["kind"], metadata(folder)["difficulty"]] += 1
    assert len(KINDS) >= 10
    assert max(counts.values()) - min(counts.values()) <= 1


def test_about_a_third_needs_several_turns(train: list[Path], heldout: list[Path]) -> None:
    for folders in (train, heldout):
        share = sum(bool(metadata(folder)["several_turns"]) for folder in folders) / len(folders)
        assert 0.28 < share < 0.4


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    once = make_tasks(tmp_path / "once", num=60, seed=5, split="train")
    again = make_tasks(tmp_path / "again", num=60, seed=5, split="train")
    other = make_tasks(tmp_path / "other", num=60, seed=6, split="train")
    assert [folder.name for folder in once] == [folder.name for folder in again]
    assert [what_it_is(folder) for folder in once] == [what_it_is(folder) for folder in again]
    assert not {folder.name for folder in once} & {folder.name for folder in other}


def test_making_the_same_tasks_again_repairs_them_and_changes_nothing_else(tmp_path: Path) -> None:
    first = make_tasks(tmp_path, num=20, seed=7, split="train")
    before = [what_it_is(folder) for folder in first]
    shutil.rmtree(first[0] / "tests")
    (first[1] / "environment" / "files" / "left-over.txt").touch()
    assert make_tasks(tmp_path, num=20, seed=7, split="train") == first
    assert [what_it_is(folder) for folder in first] == before


def test_ids_follow_content() -> None:
    task = draw_task("move", "easy", seed=1)
    assert task_id(task) == task_id(draw_task("move", "easy", seed=1))
    assert task_id(task) != task_id(draw_task("move", "easy", seed=2))
    assert task_id(task).startswith("move-easy-")


def test_a_loaded_task_says_what_was_made(train: list[Path]) -> None:
    for folder in train:
        task = load_task(folder)
        assert task.id == f"{task.kind}-{task.difficulty}-{folder.name.rpartition('-')[2]}"
        assert task.several_turns == metadata(folder)["several_turns"]
        assert task.instruction == (folder / "instruction.md").read_text().strip()


# what the agent reads


@pytest.mark.parametrize(("kind", "difficulty"), CELLS)
def test_what_must_be_found_is_not_in_the_instruction(kind: str, difficulty: Difficulty) -> None:
    for seed in range(25):
        for task in every_variant(kind, difficulty, seed=seed):
            assert task.several_turns == bool(task.scene.hidden)
            for hidden in task.scene.hidden:
                pattern = rf"(?<!\w){re.escape(hidden)}(?!\w)"
                assert not re.search(pattern, task.scene.instruction), task


def test_quickstart_tasks_are_short_enough_for_a_small_model() -> None:
    several_turns: set[str] = set()
    for kind in QUICKSTART_KINDS:
        for difficulty in DIFFICULTIES:
            for seed in range(40):
                task = draw_task(kind, difficulty, seed=seed)
                several_turns |= {kind} if task.several_turns else set()
                # About 4 characters a token: 30 tokens of instruction, 20 of command.
                assert len(task.scene.instruction) <= 120, task.scene.instruction
                assert all(len(command) <= 80 for command in task.scene.commands), task.scene.commands
    assert len(QUICKSTART_KINDS) >= 6
    assert len(several_turns) >= 2


def test_quickstart_tasks_are_asked_for_in_several_ways() -> None:
    for kind in QUICKSTART_KINDS:
        for difficulty in DIFFICULTIES:
            instructions = (draw_task(kind, difficulty, seed=seed).scene.instruction for seed in range(100))
            beginnings = {" ".join(text.split()[:2]) for text in instructions if "." not in text.split()[0]}
            assert len(beginnings) >= 3, (kind, difficulty, beginnings)


# the oracle's transcript


def test_a_transcript_is_one_block_a_turn_and_ends_with_done(train: list[Path]) -> None:
    for folder in train:
        *looks, last = oracle_turns(load_task(folder))
        assert all(re.fullmatch(r"```bash\n[^`]+\n```", text) for text in looks)
        assert re.fullmatch(r"```bash\n[^`]+\n```\nDONE", last)
        commands = [text.removesuffix("\nDONE")[len("```bash\n") : -len("\n```")] for text in (*looks, last)]
        assert solution(folder).splitlines()[2:] == commands
        assert bool(looks) == metadata(folder)["several_turns"]


def test_a_task_without_transcript_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"solution/turns\.json"):
        oracle_turns(Task(id="a", instruction="", folder=tmp_path))
    with pytest.raises(TaskError, match="got none"):
        oracle_turns(Task(id="a", instruction=""))


# the verdict


@pytest.mark.sandbox
@pytest.mark.parametrize(("kind", "difficulty"), CELLS)
def test_only_the_oracle_passes(kind: str, difficulty: Difficulty, tmp_path: Path) -> None:
    tasks: list[ShellTask] = []
    while len(tasks) < 3:
        tasks += every_variant(kind, difficulty, seed=len(tasks))
    for task in tasks:
        harbor = written(task, tmp_path)
        assert asyncio.run(run_oracle(harbor, SETTINGS)).value == 1, task
        assert reward(harbor, oracle_turns(harbor)) == 1, task
        assert reward(harbor, []) == 0, task
        assert reward(harbor, [block(task.scene.cheat)]) == 0, task


def first_task(kind: str, difficulty: Difficulty, number: int) -> ShellTask:
    return every_variant(kind, difficulty, seed=1)[number]


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("kind", "number", "command"),
    [
        ("move", 0, "cp {0} {1} && rm -f {0}"),
        ("copy", 0, "cat {0} > {1}"),
        ("copy", 0, "cp -a {0} ./{1}"),
        ("write", 0, "printf {0} > {1}"),
        ("write", 0, "python3 -c 'print(\"{0}\")' > /app/{1}"),
        ("make", 0, "mkdir -m 700 /app/{0}"),
        ("archives", 0, "mkdir x && tar -C x -xvf {0} && mv x/* . && rmdir x"),
        ("text", 0, "cat {0} | sort | tee {1}"),
        ("count", 0, "awk 'END{{print NR}}' {0} > {1}"),
    ],
)
def test_another_right_way_passes(kind: str, number: int, command: str, tmp_path: Path) -> None:
    task = first_task(kind, "easy", number)
    names = [word.rstrip("/") for word in task.scene.commands[0].split()[1:] if word[0] not in "-<>"]
    assert reward(written(task, tmp_path), [block(command.format(*names))]) == 1, task


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "command",
    [
        "echo {word} more > {file}",
        "printf '{word}\\0' > {file}",
        "echo {word} > real; ln -s real {file}",
        "ln -s /dev/zero {file}",
        "mkfifo {file}",
        "mkdir {file}",
        "yes {word} | head -c 30000000 > {file}",
        "echo {word} > {file}; chmod 000 {file}",
        "echo {word} > {file}; rm -f *",
        "cd /; rm -rf /app/* /app/.* /app",
        "for t in stat tr ls; do printf '#!/bin/sh\\nexit 0' > $t; chmod +x $t; done; export PATH=/app:$PATH",
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    ],
)
def test_a_strange_world_gets_a_verdict_and_it_is_zero(command: str, tmp_path: Path) -> None:
    task = first_task("write", "easy", 0)
    word, _, file = task.scene.commands[0].removeprefix("echo ").split()
    assert reward(written(task, tmp_path), [block(command.format(word=word, file=file))]) == 0


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "made", ["mkfifo {file}", "ln -s /dev/zero {file}", "ln -s /app/fifo {file}; mkfifo /app/fifo"]
)
def test_an_archive_that_never_ends_gets_a_verdict_and_it_is_zero(made: str, tmp_path: Path) -> None:
    packing = [task for task in every_variant("archives", "easy", seed=1) if "packs" in " ".join(task.scene.conditions)]
    assert packing, "no task that makes an archive"
    task = packing[0]
    wanted = next(condition for condition in task.scene.conditions if condition.startswith("packs"))
    file = wanted.split()[1]
    assert reward(written(task, tmp_path), [block(f"rm -rf {file}; {made.format(file=file)}")]) == 0


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "body",
    [
        "(while :; do echo 1 > /logs/verifier/reward.txt; done) & echo",
        "setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' & echo",
        "echo 1 > /logs/verifier/reward.txt; kill -9 $PPID",
        "sleep 300",
        "yes",
        "for i in $(seq 99); do head -c 900000 /dev/zero > /logs/verifier/$i; done",
    ],
)
def test_a_script_under_test_cannot_grade_itself_nor_hang_the_verifier(body: str, tmp_path: Path) -> None:
    task = first_task("fix", "easy", 0)
    script = next(path for path in task.scene.changed)
    command = f"cat > {script} <<'END'\n{body}\nEND"
    assert reward(written(task, tmp_path), [block(command)]) == 0


@pytest.mark.sandbox
def test_json_may_be_laid_out_and_ordered_in_any_way(tmp_path: Path) -> None:
    task = first_task("json", "hard", 1)
    (file,) = task.scene.changed
    key = re.findall(r'"(\w+)"', task.scene.commands[0])[0]
    command = (
        f'python3 -c \'import json; d = json.load(open("{file}")); del d["{key}"]; '
        f'json.dump(d, open("{file}", "w"), sort_keys=True, separators=(",", ":"))\''
    )
    assert reward(written(task, tmp_path), [block(command)]) == 1


# what is refused


def test_permissions_of_the_world_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        (folder,) = make_tasks(tmp_path / "tasks", num=1, seed=1, split="train", kinds=["search"])
    finally:
        os.umask(before)
    for path in (folder / "environment" / "files").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": ["mov"]}, "did you mean 'move'"),
        ({"difficulties": ["simple"]}, "choose from easy, medium, hard"),
        ({"split": "test"}, "choose from train, heldout"),
        ({"num": 0}, "at least one task"),
        ({"num": 5000, "kinds": ["git"], "difficulties": ["easy"]}, "used up"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    wanted = {"num": 3, "seed": 1, "split": "train", **arguments}
    with pytest.raises(ConfigError, match=message):
        make_tasks(tmp_path / "tasks", **wanted)  # type: ignore[arg-type]
    assert not (tmp_path / "tasks").exists()


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    with pytest.raises(ConfigError, match="'precious'"):
        make_tasks(tmp_path, num=3, seed=1, split="train")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
