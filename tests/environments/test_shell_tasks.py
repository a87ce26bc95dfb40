"""The generated shell tasks: different, split cleanly, solvable by their oracle and by nothing cheaper."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path
from random import Random

import pytest

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
from thundersyncrl.environments.shell_tasks.words import Draw
from thundersyncrl.errors import ConfigError, TaskError
from thundersyncrl.records import Task

CELLS = [(kind, difficulty) for kind in KINDS for difficulty in DIFFICULTIES]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_tasks(tmp_path_factory.mktemp("train"), num=400, seed=1, split="train")


@pytest.fixture(scope="module")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_tasks(tmp_path_factory.mktemp("heldout"), num=120, seed=1, split="heldout")


def every_variant(kind: str, difficulty: str, *, seed: int) -> list[ShellTask]:
    """One task of each variant that the kind has at this difficulty."""
    return [
        ShellTask(kind=kind, difficulty=difficulty, scene=variant(Draw(Random(f"{seed}/{number}"))))
        for number, variant in enumerate(KINDS[kind][difficulty])
    ]


def what_it_is(folder: Path) -> str:
    """A hash of all that makes this task differ from another: the world, the instruction, the verifier."""
    digest = hashlib.sha256()
    for part in ("instruction.md", "environment", "tests"):
        paths = sorted((folder / part).rglob("*")) if (folder / part).is_dir() else [folder / part]
        for path in paths:
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def metadata(folder: Path) -> dict[str, object]:
    return tomllib.loads((folder / "task.toml").read_text())["metadata"]


def solution(folder: Path) -> str:
    return (folder / "solution" / "solve.sh").read_text()


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
        counts[str(metadata(folder)["kind"]), str(metadata(folder)["difficulty"])] += 1
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


def test_writing_the_same_tasks_again_changes_nothing(tmp_path: Path) -> None:
    first = make_tasks(tmp_path, num=20, seed=7, split="train")
    before = [what_it_is(folder) for folder in first]
    assert make_tasks(tmp_path, num=20, seed=7, split="train") == first
    assert [what_it_is(folder) for folder in first] == before


def test_the_first_tasks_of_a_larger_set_need_not_be_the_smaller_set_but_ids_follow_content() -> None:
    task = draw_task("move", "easy", seed=1)
    assert task_id(task) == task_id(draw_task("move", "easy", seed=1))
    assert task_id(task) != task_id(draw_task("move", "easy", seed=2))
    assert task_id(task).startswith("move-easy-")


@pytest.mark.parametrize(("kind", "difficulty"), CELLS)
def test_what_must_be_found_is_not_in_the_instruction(kind: str, difficulty: str) -> None:
    for seed in range(25):
        for task in every_variant(kind, difficulty, seed=seed):
            assert task.several_turns == bool(task.scene.hidden)
            for hidden in task.scene.hidden:
                pattern = rf"(?<!\w){re.escape(hidden)}(?!\w)"
                assert not re.search(pattern, task.scene.instruction), task


@pytest.mark.parametrize(("kind", "difficulty"), CELLS)
def test_a_world_names_no_file_twice_and_shows_neither_verifier_nor_solution(
    kind: str, difficulty: str, tmp_path: Path
) -> None:
    for task in every_variant(kind, difficulty, seed=1):
        folder = write_task(task, tmp_path / task_id(task), split=split_of(task))
        world = {
            path.relative_to(folder / "environment" / "files") for path in (folder / "environment" / "files").rglob("*")
        }
        assert {str(path) for path in world if path.suffix} >= set(task.scene.files)
        assert not any(path.parts[0] in ("tests", "solution") for path in world)


def test_quickstart_tasks_are_short_enough_for_a_small_model() -> None:
    several_turns = set()
    for kind in QUICKSTART_KINDS:
        for difficulty in DIFFICULTIES:
            for seed in range(40):
                task = draw_task(kind, difficulty, seed=seed)
                several_turns |= {kind} if task.several_turns else set()
                # About 4 characters a token: 35 tokens of instruction, 25 of command.
                assert len(task.scene.instruction) <= 120, task.scene.instruction
                assert all(len(command) <= 75 for command in task.scene.commands), task.scene.commands
    assert len(QUICKSTART_KINDS) >= 6
    assert len(several_turns) >= 2


def test_quickstart_tasks_are_asked_for_in_several_ways() -> None:
    for kind in QUICKSTART_KINDS:
        for difficulty in DIFFICULTIES:
            shapes = {
                re.sub(r"[\w-]+\.\w+|\d+", "_", draw_task(kind, difficulty, seed=seed).scene.instruction)[:12]
                for seed in range(100)
            }
            assert len(shapes) >= 3, (kind, difficulty, shapes)


def test_a_transcript_is_one_block_a_turn_and_ends_with_done(train: list[Path]) -> None:
    for folder in train:
        *looks, last = oracle_turns(Task(id=folder.name, instruction="", folder=folder))
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


def test_permissions_of_the_world_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    import os

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


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    with pytest.raises(ConfigError, match="'precious'"):
        make_tasks(tmp_path, num=3, seed=1, split="train")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
