"""Every task comes once an epoch, in an order that seed, epoch and weights decide."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.environments.task_order import TaskOrder
from thundersyncrl.errors import ConfigError
from thundersyncrl.records import Task

TASKS = [Task(id=f"{kind}-{index}", instruction="", kind=kind) for kind in ("copy", "notes") for index in range(20)]


@given(
    seed=st.integers(0, 1000),
    weight=st.floats(0.01, 100),
    sizes=st.lists(st.integers(0, 15), min_size=1, max_size=8),
)
def test_every_task_comes_once_an_epoch(seed: int, weight: float, sizes: list[int]) -> None:
    order = TaskOrder(TASKS, seed=seed, weights={"notes": weight})
    drawn = [task.id for size in sizes for task in order.take(size)]
    assert order.position == len(drawn) == sum(sizes)
    for start in range(0, len(drawn), len(TASKS)):
        epoch = drawn[start : start + len(TASKS)]
        assert len(set(epoch)) == len(epoch)


@given(seed=st.integers(0, 1000), position=st.integers(0, 100))
def test_a_resumed_order_goes_on_where_it_was(seed: int, position: int) -> None:
    whole = TaskOrder(TASKS, seed=seed, weights={"notes": 3.0})
    whole.take(position)
    resumed = TaskOrder(TASKS, seed=seed, position=position, weights={"notes": 3.0})
    assert resumed.take(5) == whole.take(5)


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75), (0.25, 0.2)])
def test_early_tasks_come_in_proportion_to_their_weight(weight: float, share: float) -> None:
    first = Counter(TaskOrder(TASKS, seed=seed, weights={"notes": weight}).take(1)[0].kind for seed in range(2000))
    assert first["notes"] / 2000 == pytest.approx(share, abs=0.04)


def test_a_weight_for_a_kind_that_no_task_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"copy, notes.*got note"):
        TaskOrder(TASKS, seed=0, weights={"note": 3.0})


def test_no_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one training task"):
        TaskOrder([], seed=0)
