"""Early forwards: what runs while a trajectory lives, within which room, and what becomes of its graph."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.learner.builders import (
    gradient_of,
    learner_of,
    open_step,
    plain_gradient,
    policy_of,
    relative_error,
    trajectory,
    work,
)
from thundersyncrl.algorithms.estimator import get_estimator
from thundersyncrl.config import LoraConfig
from thundersyncrl.errors import ContractError, StaleWorkError
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.policy import Policy
from thundersyncrl.records import Trajectory

PROMPT = [5, 6, 7, 8]
REWARDS = [1.0, 0.0, 0.25]
ROOM = 1000


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_of("qwen3")


def group(draw: random.Random, *, turns: int = 3) -> list[Trajectory]:
    def tokens(count: int) -> list[int]:
        return [draw.randrange(40) for _ in range(count)]

    return [
        trajectory([(PROMPT if k == 0 else tokens(2), tokens(3)) for k in range(turns)], member=m)
        for m in range(len(REWARDS))
    ]


def end(learner: Learner, members: list[Trajectory]) -> dict[str, float]:
    for t, reward in zip(members, REWARDS, strict=True):
        learner.text(t)
        learner.reward(t.id, reward)
        work(learner)
    learner.seal()
    work(learner)
    return learner.finish_step()


def exact(policy: Policy, members: list[Trajectory]) -> list[torch.Tensor]:
    return plain_gradient(policy, get_estimator("grpo"), members, REWARDS)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2), LoraConfig(rank=2, targets=("down_proj",))])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_turns_that_ran_early_give_the_batch_gradient_and_no_token_runs_twice(family: Any, lora: Any) -> None:
    policy, members = policy_of(family, lora=lora), group(random.Random(1))
    learner = learner_of(policy, stream="turn", graph_tokens=ROOM)
    open_step(learner, members)
    for k in range(1, 4):
        for t in members:
            learner.turn(t.id, t.turns[:k])
            work(learner)
    metrics = end(learner, members)
    assert metrics["num_early_packs"] == 9
    assert metrics["num_early_trajectories"] == 3
    # the prompt once without its last token; of each trajectory neither the prompt's rest nor the last token twice
    assert metrics["learner_tokens"] == 3 + sum(len(t.token_ids) - len(PROMPT) for t in members)
    assert relative_error(gradient_of(learner), exact(policy, members)) < 1e-12


def test_past_the_room_trajectories_run_when_their_text_is_complete(policy: Policy) -> None:
    members = group(random.Random(2))
    learner = learner_of(policy, stream="turn", graph_tokens=3 + 4)
    open_step(learner, members)
    for t in members:
        learner.turn(t.id, t.turns[:2])
        work(learner)
    assert not learner.has_work
    metrics = end(learner, members)
    assert metrics["num_early_packs"] == 0
    assert relative_error(gradient_of(learner), exact(policy, members)) < 1e-12


def test_those_expected_to_end_last_run_first(policy: Policy) -> None:
    members = group(random.Random(3))
    # room for the prompt's graph and one trajectory's first turn
    learner = learner_of(policy, stream="turn", graph_tokens=3 + 3)
    open_step(learner, members)
    for t, expected in zip(members, [2.0, 9.0, 3.0], strict=True):
        learner.turn(t.id, t.turns[:1], expected_turns=expected)
    work(learner)
    assert learner._tally.early == {members[1].id}  # pyright: ignore[reportPrivateUsage]
    end(learner, members)
    assert relative_error(gradient_of(learner), exact(policy, members)) < 1e-12


def test_few_new_tokens_wait_for_the_next_turn(policy: Policy) -> None:
    members = group(random.Random(8))
    learner = learner_of(policy, stream="turn", graph_tokens=ROOM, early_tokens=4)
    open_step(learner, members)
    learner.turn(members[0].id, members[0].turns[:1])  # 3 branch tokens
    assert not _runs(learner)
    learner.turn(members[0].id, members[0].turns[:2])  # and 5 more
    assert _runs(learner)
    learner.turn(members[0].id, members[0].turns[:3])
    assert _runs(learner)
    metrics = end(learner, members)
    assert metrics["num_early_packs"] == 2
    assert relative_error(gradient_of(learner), exact(policy, members)) < 1e-12


def _runs(learner: Learner) -> bool:
    learner._absorb()  # pyright: ignore[reportPrivateUsage]
    had_work = learner.has_work
    work(learner)
    return had_work


def test_a_fresh_start_drops_the_old_graph(policy: Policy) -> None:
    members = group(random.Random(4))
    learner = learner_of(policy, stream="turn", graph_tokens=ROOM)
    open_step(learner, members)
    learner.turn(members[0].id, members[1].turns[:2])  # an attempt that failed
    work(learner)
    learner.turn(members[0].id, members[0].turns[:1])
    work(learner)
    assert learner._early.num_tokens == 3  # pyright: ignore[reportPrivateUsage]
    end(learner, members)
    assert relative_error(gradient_of(learner), exact(policy, members)) < 1e-12


def test_a_text_that_does_not_continue_what_ran_is_run_whole(policy: Policy) -> None:
    members = group(random.Random(5))
    learner = learner_of(policy, stream="turn", graph_tokens=ROOM)
    open_step(learner, members)
    learner.turn(members[0].id, members[1].turns[:2])
    work(learner)
    end(learner, members)
    assert relative_error(gradient_of(learner), exact(policy, members)) < 1e-12


def test_a_lost_trajectory_leaves_no_graph(policy: Policy) -> None:
    members = group(random.Random(6))
    learner = learner_of(policy, stream="turn", graph_tokens=ROOM)
    open_step(learner, members)
    learner.turn(members[0].id, members[0].turns[:2])
    work(learner)
    assert learner._early.num_tokens > 0  # pyright: ignore[reportPrivateUsage]
    learner.lose(members[0].id)
    work(learner)
    assert learner._early.num_tokens == 0  # pyright: ignore[reportPrivateUsage]


def test_below_level_turn_nothing_runs_early(policy: Policy) -> None:
    members = group(random.Random(7))
    learner = learner_of(policy)
    open_step(learner, members)
    learner.turn(members[0].id, members[0].turns[:2])
    work(learner)
    assert end(learner, members)["num_early_packs"] == 0


def test_a_turn_of_another_version_or_after_the_text_is_refused(policy: Policy) -> None:
    members = group(random.Random(8))
    learner = learner_of(policy, stream="turn")
    open_step(learner, members)
    stale = trajectory([(PROMPT, [1])], version=3)
    with pytest.raises(StaleWorkError, match="version 3"):
        learner.turn(members[0].id, stale.turns)
    learner.text(members[0])
    learner.turn(members[0].id, members[0].turns)
    with pytest.raises(ContractError, match="before its complete text"):
        work(learner)
