"""A step in which nothing got a verdict stops the run, whatever became of its trajectories."""

from __future__ import annotations

import pytest

from tests.runs import RunSpec, VowelWorld, run_tiny
from thundersyncrl.errors import RolloutError, VerifierError
from thundersyncrl.records import Reward


class NoVerdict(VowelWorld):
    async def grade(self) -> Reward:
        raise VerifierError("no verdict today")


class NoRoom(VowelWorld):
    system_prompt = "write " * 200  # more than the context holds


@pytest.mark.parametrize(("world", "reason"), [(NoVerdict, "no verdict today"), (NoRoom, "rollout.context_tokens")])
def test_a_step_without_any_verdict_stops_the_run_with_the_first_reason(world: type, reason: str) -> None:
    with pytest.raises(RolloutError, match=reason):
        run_tiny(RunSpec(steps=2, world=world))
