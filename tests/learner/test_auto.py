"""The level "auto": what it learns about costs and waits, and what it then lets begin."""

from __future__ import annotations

import math

import pytest

from tests.learner.builders import trajectory
from thundersyncrl.learner.auto import AutoLevel
from thundersyncrl.learner.branch import branch_tokens
from thundersyncrl.learner.costs import FRESH_STEPS, Costs, Kind, Mean
from thundersyncrl.learner.queue import GroupWork
from thundersyncrl.records import GroupId, TrajectoryId


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def group_of(index: int, *, texts: int, rewards: tuple[float, ...] = (), size: int = 4) -> GroupWork:
    """A group of `size` members: the first `texts` have their text and wait, the first few their reward."""
    work = GroupWork(GroupId(0, index), {TrajectoryId(0, index, m) for m in range(size)})
    for m in range(texts):
        branch = branch_tokens(trajectory([([5, 6], [7] * 10)], group=index, member=m))
        work.branches[branch.id] = branch
        work.pending.add(branch.id)
    for m, reward in enumerate(rewards):
        work.rewards[TrajectoryId(0, index, m)] = reward
    return work


def auto_of(*, shares_cores: bool = False) -> tuple[AutoLevel, Clock]:
    clock = Clock()
    return AutoLevel(shares_cores=shares_cores, clock=clock), clock


def pass_through(auto: AutoLevel, clock: Clock, *, seconds: float, uniform: bool = False, index: int = 0) -> None:
    """Let a group with one member missing be complete after some seconds."""
    work = group_of(index, texts=4, rewards=(0.0, 0.0, 0.0))
    auto.observe([work])
    clock.now += seconds
    work.rewards[TrajectoryId(0, index, 3)] = 0.0
    work.advantages = dict.fromkeys(work.members, 0.0 if uniform else 1.0)
    auto.observe([work])


def price(auto: AutoLevel, **costs: float) -> None:
    for kind, seconds in costs.items():
        for figure in (100.0, 100 * seconds):  # the first doesn't count
            auto.costs.add(Kind(kind), 100, figure)


def test_means_forget_what_is_long_past() -> None:
    mean = Mean()
    mean.add(100.0)
    for _ in range(200):
        mean.add(1.0)
    assert mean.value == pytest.approx(1.0, abs=0.01)


def test_costs_are_seconds_a_token_weighted_by_tokens() -> None:
    costs = Costs()
    assert costs.of(Kind.FINAL) is None
    costs.add(Kind.FINAL, 10, 100.0)
    assert costs.of(Kind.FINAL) is None  # what the first one cost says little of the next
    costs.add(Kind.FINAL, 1000, 1.0)
    costs.add(Kind.FINAL, 0, 5.0)
    costs.add(Kind.FINAL, 10, 1.0)
    assert costs.of(Kind.FINAL) == pytest.approx((0.95 * 1.0 + 1.0) / (0.95 * 1000 + 10))
    assert costs.of(Kind.OPEN) is None


def test_a_price_that_ruled_work_out_is_forgotten_so_that_the_work_gets_another_trial() -> None:
    auto, _ = auto_of()
    price(auto, open=0.010, early=0.004, late=0.020)
    for _ in range(FRESH_STEPS - 1):
        auto.begin_step()
    assert not auto.wants_early(0)
    auto.costs.add(Kind.OPEN, 100, 1.0)  # such work goes on, so its price stays known
    auto.begin_step()
    assert auto.costs.of(Kind.OPEN) == pytest.approx(0.010)
    assert auto.costs.of(Kind.LATE) is None
    assert auto.wants_early(0)


def test_everything_begins_while_nothing_is_known() -> None:
    auto, _ = auto_of()
    work = group_of(0, texts=2)
    auto.observe([work])
    assert auto.expected_wait_s(work) == math.inf
    assert auto.admits(work)
    assert auto.wants_early(0)
    assert not auto.wants_early(4)
    assert auto.reason() == "nothing is known yet"


def test_a_group_that_will_soon_be_complete_is_waited_for_until_it_is_late() -> None:
    auto, clock = auto_of()
    price(auto, final=0.010, open=0.015)  # 10 branch tokens: not waiting costs 0.05 s
    pass_through(auto, clock, seconds=0.02)
    work = group_of(1, texts=3, rewards=(0.0, 1.0, 0.0))
    auto.observe([work])
    assert auto.expected_wait_s(work) == pytest.approx(0.02)
    assert not auto.admits(work)
    clock.now += 0.04
    assert auto.expected_wait_s(work) == pytest.approx(0.04)
    assert not auto.admits(work)
    clock.now += 0.02  # later than ever: among long-tailed waits it will be later still
    assert auto.admits(work)


def test_a_group_that_takes_long_begins_at_once() -> None:
    auto, clock = auto_of()
    price(auto, final=0.010, open=0.015)
    pass_through(auto, clock, seconds=3.0)
    work = group_of(1, texts=3, rewards=(0.0, 1.0, 0.0))
    auto.observe([work])
    assert auto.admits(work)
    assert "3.00 s away, not waiting costs 0.05 s" in auto.reason()


def test_waits_are_told_apart_by_how_many_are_missing() -> None:
    auto, clock = auto_of()
    pass_through(auto, clock, seconds=3.0)
    work = group_of(1, texts=2, rewards=(0.0, 1.0))
    auto.observe([work])
    assert auto.expected_wait_s(work) == math.inf


@pytest.mark.parametrize(("shares_cores", "begins"), [(True, False), (False, True)])
def test_on_shared_cores_groups_that_mostly_end_uniform_are_waited_for(shares_cores: bool, begins: bool) -> None:
    auto, clock = auto_of(shares_cores=shares_cores)
    for index in range(5):
        pass_through(auto, clock, seconds=3.0, uniform=index < 3, index=index)
    same = group_of(8, texts=3, rewards=(1.0, 1.0))
    differ = group_of(9, texts=3, rewards=(0.0, 1.0))
    auto.observe([same, differ])
    assert auto.admits(same) is begins
    assert auto.admits(differ)


@pytest.mark.parametrize(
    ("shares_cores", "late", "wanted"), [(False, 0.009, True), (False, 0.011, False), (True, 0.009, False)]
)
def test_turns_run_early_when_less_is_left_at_the_end(shares_cores: bool, late: float, wanted: bool) -> None:
    auto, _ = auto_of(shares_cores=shares_cores)
    price(auto, open=0.010, early=0.004, late=late)
    assert auto.wants_early(100) is wanted


def test_what_was_learned_outlives_the_step() -> None:
    auto, clock = auto_of()
    price(auto, final=0.010, open=0.015)
    pass_through(auto, clock, seconds=3.0)
    auto.begin_step()
    work = group_of(0, texts=3, rewards=(0.0, 1.0, 0.0))
    auto.observe([work])
    assert auto.expected_wait_s(work) == pytest.approx(3.0)
    assert auto.costs.of(Kind.OPEN) == pytest.approx(0.015)
