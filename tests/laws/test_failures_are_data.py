"""A failure leaves its trajectory out with a reason and never counts as reward 0; nothing of a step outlives it."""

from __future__ import annotations

import gc
from typing import ClassVar

import pytest

from tests.runs import RunSpec, VowelWorld, run_tiny
from thundersyncrl.environments.environment import Observation
from thundersyncrl.errors import RolloutError, VerifierError
from thundersyncrl.records import Reward, Trajectory


class SecondVerdictFails(VowelWorld):
    """Every second verifier raises, whichever member it belongs to."""

    count = 0

    async def grade(self) -> Reward:
        type(self).count += 1
        if type(self).count % 2 == 0:
            raise VerifierError("the verifier broke")
        return await super().grade()


class NoVerdict(VowelWorld):
    async def grade(self) -> Reward:
        raise ValueError("reward function raised")


class FirstCommandLost(VowelWorld):
    """The first world of each task breaks; a fresh try works."""

    broken: ClassVar[set[str]] = set()

    async def open(self) -> None:
        if self._task.id not in self.broken:
            self.broken.add(self._task.id)
            raise OSError("no room")


class LongOutput(VowelWorld):
    async def act(self, action_text: str) -> Observation:
        observation = await super().act(action_text)
        self.seen = "x" * 200_000
        return observation


def test_a_verifier_without_verdict_takes_its_trajectory_out_and_the_group_closes_with_the_survivors():
    """Case H-16."""
    SecondVerdictFails.count = 0
    result = run_tiny(RunSpec(steps=2, world=SecondVerdictFails))
    for report in result.recorder.reports:
        assert report.failures == {"verifier": 6}
        assert report.num_trained + report.num_dropped == 6
        assert report.metrics["reward_mean"] > 0.0


def test_a_run_without_any_verdict_stops_in_its_first_step_with_the_reason():
    """Case H-16."""
    with pytest.raises(RolloutError, match="reward function raised"):
        run_tiny(RunSpec(steps=2, world=NoVerdict))


def test_a_lost_environment_is_tried_again():
    FirstCommandLost.broken = set()
    result = run_tiny(RunSpec(steps=1, world=FirstCommandLost))
    assert FirstCommandLost.broken
    assert result.recorder.reports[0].num_failed == 0


@pytest.mark.parametrize("stream", ["batch", "trajectory"])
def test_finished_trajectories_are_released(stream: str):
    """Case H-23."""
    alive: list[int] = []
    grades = 0

    class Counting(LongOutput):
        async def grade(self) -> Reward:
            nonlocal grades
            grades += 1
            if grades % 12 == 0:  # looking through all objects is slow
                gc.collect()
                alive.append(sum(type(o) is Trajectory for o in gc.get_objects()))
            return await super().grade()

    run_tiny(RunSpec(steps=12, stream=stream, world=Counting, num_groups=1, keeps_trajectories=False))
    assert len(alive) == 4
    assert alive[-1] <= alive[0] + 4, alive
