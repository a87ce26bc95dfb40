"""The tasks of a run: generated once, never mixed with other tasks, never silently those of another config."""

from __future__ import annotations

from pathlib import Path

import pytest

from thundersyncrl.config import Config, parse_config
from thundersyncrl.environments.shell_tasks import make_tasks
from thundersyncrl.errors import ConfigError
from thundersyncrl.records import Task
from thundersyncrl.task_sets import task_set


class Announced(list[str]):
    """What was announced."""

    def __call__(self, text: str) -> None:
        self.append(text)


def config_of(*overrides: str) -> Config:
    return parse_config({"tasks": {"num_train": 6, "num_heldout": 4}}, overrides)


def ids(tasks: list[Task]) -> list[str]:
    return sorted(task.id for task in tasks)


def test_tasks_are_generated_once_and_the_splits_are_apart(tmp_path: Path) -> None:
    announced = Announced()
    train = task_set(config_of(), "train", tmp_path, announced)
    heldout = task_set(config_of(), "heldout", tmp_path, announced)
    assert (len(train), len(heldout)) == (6, 4)
    assert set(ids(train)).isdisjoint(ids(heldout))
    assert ids(task_set(config_of(), "train", tmp_path, announced)) == ids(train)
    assert len(announced) == 2, "made once each"


@pytest.mark.parametrize(
    "override", ["seed=1", "tasks.num_train=7", "tasks.kinds=copy,make", "tasks.difficulties=easy"]
)
def test_tasks_of_another_config_are_made_anew(tmp_path: Path, override: str) -> None:
    before = task_set(config_of(), "train", tmp_path, Announced())
    after = task_set(config_of(override), "train", tmp_path, Announced())
    assert ids(after) != ids(before)
    assert ids(after) == ids(task_set(config_of(override), "train", tmp_path / "fresh", Announced()))


def test_a_generation_that_was_cut_is_done_again(tmp_path: Path) -> None:
    whole = task_set(config_of(), "train", tmp_path / "whole", Announced())
    (tmp_path / "cut" / "train.part" / "half").mkdir(parents=True)
    assert ids(task_set(config_of(), "train", tmp_path / "cut", Announced())) == ids(whole)


def test_fewer_tasks_than_kinds_can_be_generated(tmp_path: Path) -> None:
    assert (
        len(task_set(config_of("tasks.num_train=2", "tasks.kinds=copy,make,move"), "train", tmp_path, Announced())) == 2
    )


def test_a_folder_of_other_tasks_is_not_taken_for_generated(tmp_path: Path) -> None:
    make_tasks(tmp_path / "train", num=2, seed=5, split="train")
    with pytest.raises(ConfigError, match=r"isn't generated; name it in `tasks\.train`"):
        task_set(config_of(), "train", tmp_path, Announced())


def test_a_given_folder_is_read_and_filtered(tmp_path: Path) -> None:
    make_tasks(tmp_path / "own", num=30, seed=5, split="train")
    overrides = ("tasks.num_train=240", f"tasks.train={tmp_path / 'own'}")
    every = task_set(config_of(*overrides), "train", tmp_path / "none", Announced())
    easy = task_set(config_of(*overrides, "tasks.difficulties=easy"), "train", tmp_path / "none", Announced())
    assert len(every) == 30
    assert ids(easy) == ids([task for task in every if task.difficulty == "easy"])
    assert not (tmp_path / "none").exists()


def test_a_choice_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    make_tasks(tmp_path / "own", num=2, seed=5, split="train", difficulties=["easy"])
    overrides = ("tasks.num_train=240", f"tasks.train={tmp_path / 'own'}", "tasks.difficulties=hard")
    with pytest.raises(ConfigError, match="expected tasks of difficulty hard, got none among 2"):
        task_set(config_of(*overrides), "train", tmp_path / "none", Announced())
