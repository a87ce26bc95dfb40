"""The asynchronous loop: how old a trained trajectory may be, what is begun when, and how a run of it ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.learner.builders import trajectory
from tests.runs import Recorder, RunSpec, VowelWorld, run_tiny
from thundersyncrl.ahead import HeldSink
from thundersyncrl.environments.environment import Observation
from thundersyncrl.observe.lines import step_line
from thundersyncrl.records import GroupId, Reward, StepReport, Trajectory, TrajectoryId


class CountedWorld(VowelWorld):
    """Counts how many are open at once; some take much longer than the others."""

    num_open = 0
    most_open = 0

    async def open(self) -> None:
        cls = type(self)
        cls.num_open += 1
        cls.most_open = max(cls.most_open, cls.num_open)
        await super().open()

    async def act(self, action_text: str) -> Observation:
        if len(action_text) % 4 == 0:
            await asyncio.sleep(0.05)
        return await super().act(action_text)

    async def close(self) -> None:
        type(self).num_open -= 1


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_no_trained_trajectory_is_older_than_allowed_and_some_are_older_than_now(max_staleness: int) -> None:
    CountedWorld.num_open = CountedWorld.most_open = 0
    result = run_tiny(RunSpec(steps=6, max_staleness=max_staleness, world=CountedWorld))
    ages = [t.id.step - t.version for t in result.recorder.trajectories]
    assert 0 < max(ages) <= max_staleness
    assert min(ages) == 0  # the first step has nothing older
    assert Counter(t.id.step for t in result.recorder.trajectories) == dict.fromkeys(range(6), 12)
    assert len({t.id for t in result.recorder.trajectories}) == 72
    reports = result.recorder.reports
    assert [r.step for r in reports] == list(range(6))
    assert all(r.num_trained == r.num_launched == 12 for r in reports)
    told = [r.metrics["staleness_max"] for r in reports]
    of_step = [max(t.id.step - t.version for t in result.recorder.trajectories if t.id.step == s) for s in range(6)]
    assert told == of_step
    assert CountedWorld.most_open <= 12
    assert CountedWorld.num_open == 0


@pytest.mark.parametrize("stream", ["batch", "turn", "auto"])
def test_every_level_trains_ahead(stream: str) -> None:
    result = run_tiny(RunSpec(steps=4, stream=stream, max_staleness=1))
    assert [r.num_trained for r in result.recorder.reports] == [12] * 4
    assert all(r.metrics["mismatch_max"] < 1e-8 for r in result.recorder.reports)  # of the learner's own version


def test_a_resumed_run_goes_on_where_the_first_untrained_step_drew_its_tasks() -> None:
    assert run_tiny(RunSpec(steps=5, max_staleness=3)).positions == [3, 6, 9, 12, 15]


class UniformWorld(VowelWorld):
    """Every reward is the same, so that every group is played again."""

    async def grade(self) -> Reward:
        return Reward(value=1.0)


def test_groups_in_place_of_uniform_ones_dont_wait_for_later_steps() -> None:
    result = run_tiny(RunSpec(steps=3, max_staleness=2, estimator="dapo", extra_groups=2, world=UniformWorld))
    assert [r.num_launched for r in result.recorder.reports] == [20] * 3


class Broken(Recorder):
    """Fails when it hears of a step that runs ahead."""

    def sample(self, trajectory: Trajectory, reward: float | None) -> None:
        if trajectory.id.step == 1:
            raise RuntimeError("the display broke")


class StuckWorld(VowelWorld):
    """The first trajectory opened never ends by itself."""

    num_opened = 0

    async def act(self, action_text: str) -> Observation:
        if not hasattr(self, "_number"):
            self._number = type(self).num_opened
            type(self).num_opened += 1
        if self._number == 0:
            await asyncio.sleep(50.0)
        return await super().act(action_text)


def test_a_failure_in_a_later_step_ends_the_run_at_once() -> None:
    StuckWorld.num_opened = 0
    with pytest.raises(BaseExceptionGroup) as caught:
        run_tiny(RunSpec(steps=4, max_staleness=1, world=StuckWorld, recorder=Broken()))
    assert caught.group_contains(RuntimeError, match="the display broke")


class Heard:
    """A sink that writes down what it hears."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def open_group(self, group: GroupId, members: Any) -> None:
        self.calls.append(("open", group, tuple(members)))

    def turn(self, member: TrajectoryId, turns: Any, *, expected_turns: float | None = None) -> None:
        self.calls.append(("turn", member, len(turns), expected_turns))

    def text(self, trajectory: Trajectory) -> None:
        self.calls.append(("text", trajectory.id))

    def reward(self, member: TrajectoryId, reward: float) -> None:
        self.calls.append(("reward", member, reward))

    def lose(self, member: TrajectoryId) -> None:
        self.calls.append(("lose", member))


def test_a_held_sink_hands_on_in_order_and_of_live_trajectories_only_the_newest_turns() -> None:
    heard = Heard()
    sink = HeldSink(heard)
    members = [trajectory([([1], [2]), ([3], [4])], member=m) for m in range(3)]
    done, live, lost = members
    sink.open_group(done.id.group_id, [t.id for t in members])
    for t in members:
        sink.turn(t.id, t.turns[:1], expected_turns=2.0)
    sink.turn(live.id, live.turns, expected_turns=3.0)
    sink.text(done)
    sink.lose(lost.id)
    sink.reward(done.id, 1.0)
    assert heard.calls == []
    sink.release()
    assert heard.calls == [
        ("open", done.id.group_id, tuple(t.id for t in members)),
        ("text", done.id),
        ("lose", lost.id),
        ("reward", done.id, 1.0),
        ("turn", live.id, 2, 3.0),
    ]
    sink.text(live)
    assert heard.calls[-1] == ("text", live.id)


def test_the_report_line_says_that_a_step_was_asynchronous() -> None:
    report: StepReport = run_tiny(RunSpec(steps=2, max_staleness=1)).recorder.reports[-1]
    assert "asynchronous, " in step_line(report)
