"""Law: every gradient is taken at the version that sampled its tokens; stale, doubled and untimely work raises."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.learner.builders import (
    STREAMS,
    gradient_of,
    learner_of,
    open_step,
    plain_gradient,
    policy_of,
    random_group,
    relative_error,
    run_step,
    trajectory,
    work,
)
from thundersyncrl.algorithms.estimator import get_estimator
from thundersyncrl.config import LearnerConfig
from thundersyncrl.errors import ContractError, PhaseError, StaleWorkError, ThunderSyncError
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.optimizer import PolicyOptimizer
from thundersyncrl.learner.policy import Policy
from thundersyncrl.records import GroupId, Trajectory, TrajectoryId, Turn


@pytest.fixture
def policy() -> Policy:
    torch.set_num_threads(1)
    return policy_of()


@pytest.fixture
def members() -> list[Trajectory]:
    return random_group(random.Random(0))


def started(policy: Policy, members: list[Trajectory], **options: Any) -> Learner:
    learner = learner_of(policy, **options)
    open_step(learner, members)
    return learner


def unstepped(learner: Learner) -> bool:
    probe: Any = learner.optimizer
    return probe.num_steps == 0


def test_a_trajectory_of_another_version_is_refused(policy: Policy) -> None:
    learner = started(policy, random_group(random.Random(0)))
    for version in (1, 7):
        with pytest.raises(StaleWorkError, match=f"version 0, got version {version}"):
            learner.text(trajectory([([1, 2], [3])], version=version))


def test_after_a_step_the_old_version_is_stale(policy: Policy, members: list[Trajectory]) -> None:
    learner = learner_of(policy)
    run_step(learner, members, [1.0, 0.0, 0.0, 0.0])
    again = random_group(random.Random(0))
    open_step(learner, again)
    with pytest.raises(StaleWorkError, match="version 1, got version 0"):
        learner.text(again[0])


def test_one_trajectory_has_one_version() -> None:
    """Case H-21: a sample that went on under newer weights can't even be written down."""
    old = Turn(observation_ids=(1,), action_ids=(2,), behavior_logprobs=(0.0,), version=1)
    new = Turn(observation_ids=(3,), action_ids=(4,), behavior_logprobs=(0.0,), version=2)
    whole = trajectory([([1], [2])])
    with pytest.raises(ContractError, match="one policy version"):
        Trajectory(id=whole.id, task=whole.task, turns=(old, new), outcome=whole.outcome)


@pytest.mark.parametrize("stream", STREAMS)
def test_an_aborted_group_starts_again_under_the_new_version(stream: str) -> None:
    """Case H-21: over 20 steps every trained sample is of the version that its gradient is taken at."""
    torch.set_num_threads(1)
    policy = policy_of()
    optimizer = PolicyOptimizer(policy.trained, LearnerConfig(learning_rate=1e-3), total_steps=20)
    learner = learner_of(policy, optimizer=optimizer, stream=stream)
    draw = random.Random(1)
    aborted: list[Trajectory] = []
    for step in range(20):
        assert learner.version == step
        fresh = random_group(draw, group=0, step=step)
        requeued = random_group(draw, group=1, step=step)
        open_step(learner, [*fresh, *requeued])
        for stale in aborted:  # what an engine that kept half a sample would hand over
            with pytest.raises(StaleWorkError):
                learner.text(stale)
        for t in fresh:
            learner.text(t)
            learner.reward(t.id, draw.random())
        for t in requeued:
            learner.lose(t.id)
        aborted = requeued
        learner.seal()
        work(learner)
        metrics = learner.finish_step()
        assert (metrics["num_survivors"], metrics["num_lost"]) == (4, 4)


def test_a_written_parameter_ends_the_step(policy: Policy, members: list[Trajectory]) -> None:
    learner = started(policy, members)
    learner.text(members[0])
    work(learner)
    with torch.no_grad():
        next(iter(policy.trained.values())).add_(1e-3)
    learner.text(members[1])
    with pytest.raises(StaleWorkError, match="unchanged"):
        work(learner)
    assert unstepped(learner)


def test_a_parameter_written_after_the_last_gradient_is_noticed_too(policy: Policy, members: list[Trajectory]) -> None:
    learner = started(policy, members)
    for t in members:
        learner.text(t)
        learner.reward(t.id, float(t.id.member))
    learner.seal()
    work(learner)
    with torch.no_grad():
        list(policy.trained.values())[-1].mul_(1.0)
    with pytest.raises(StaleWorkError, match="unchanged"):
        learner.finish_step()
    assert unstepped(learner)


def test_work_before_the_step_begins_is_refused(policy: Policy, members: list[Trajectory]) -> None:
    learner = learner_of(policy)
    learner.text(members[0])
    with pytest.raises(ThunderSyncError):
        learner.run_once()


def test_a_step_begins_once(policy: Policy, members: list[Trajectory]) -> None:
    learner = started(policy, members)
    with pytest.raises(PhaseError, match="settle"):
        learner.begin_step()


def test_a_step_with_open_groups_does_not_end(policy: Policy, members: list[Trajectory]) -> None:
    learner = started(policy, members)
    with pytest.raises(PhaseError, match="seal"):
        learner.finish_step()
    learner.seal()
    for t in members[:-1]:
        learner.text(t)
        learner.reward(t.id, 1.0)
    work(learner)
    with pytest.raises(PhaseError, match=str(members[-1].id)):
        learner.finish_step()
    learner.text(members[-1])
    learner.reward(members[-1].id, 0.0)
    with pytest.raises(PhaseError, match="work left"):
        learner.finish_step()
    assert unstepped(learner)
    work(learner)
    learner.finish_step()
    expected = plain_gradient(policy, get_estimator("grpo"), members, [1.0, 1.0, 1.0, 0.0])
    assert relative_error(gradient_of(learner), expected) < 1e-12  # refusals changed nothing


def test_a_step_ends_once(policy: Policy, members: list[Trajectory]) -> None:
    learner = learner_of(policy)
    run_step(learner, members, [1.0, 0.0, 0.0, 0.0])
    with pytest.raises(ThunderSyncError):
        learner.finish_step()
    probe: Any = learner.optimizer
    assert (probe.num_steps, learner.version) == (1, 1)


def test_nothing_comes_twice(policy: Policy, members: list[Trajectory]) -> None:
    learner = started(policy, members)
    learner.text(members[0])
    learner.text(members[0])
    with pytest.raises(ContractError, match="twice"):
        work(learner)
    learner = started(policy, members)
    learner.text(members[0])
    learner.reward(members[0].id, 1.0)
    learner.reward(members[0].id, 1.0)
    with pytest.raises(ContractError, match="second"):
        work(learner)
    learner = started(policy, members)
    with pytest.raises(ContractError, match="opened before"):
        learner.open_group(members[0].id.group_id, [members[0].id])


def test_nothing_comes_unannounced(policy: Policy, members: list[Trajectory]) -> None:
    for stranger in (trajectory([([1, 2], [3])], member=9), trajectory([([1, 2], [3])], group=5)):
        learner = started(policy, members)
        learner.text(stranger)
        with pytest.raises(ContractError, match="announced"):
            work(learner)
        learner = started(policy, members)
        learner.lose(stranger.id)
        with pytest.raises(ContractError, match="announced"):
            work(learner)


@pytest.mark.parametrize("stranger", [TrajectoryId(0, 0, 9), TrajectoryId(0, 5, 0), TrajectoryId(1, 0, 0)])
def test_a_reward_for_nobody_is_refused(policy: Policy, members: list[Trajectory], stranger: TrajectoryId) -> None:
    learner = started(policy, members)
    learner.reward(stranger, 1.0)
    with pytest.raises(ContractError, match="announced"):
        work(learner)


def test_a_reward_before_its_text_is_refused(policy: Policy, members: list[Trajectory]) -> None:
    learner = started(policy, members)
    learner.reward(members[0].id, 1.0)
    with pytest.raises(ContractError, match="text"):
        work(learner)


def test_a_member_with_a_reward_is_not_lost(policy: Policy, members: list[Trajectory]) -> None:
    learner = started(policy, members)
    learner.text(members[0])
    learner.reward(members[0].id, 1.0)
    work(learner)
    learner.lose(members[0].id)
    with pytest.raises(ContractError, match="without a reward"):
        work(learner)


def test_a_lost_member_stays_lost(policy: Policy, members: list[Trajectory]) -> None:
    learner = started(policy, members)
    learner.lose(members[0].id)
    learner.text(members[0])
    with pytest.raises(ContractError, match="announced"):
        work(learner)


@pytest.mark.parametrize("read_first", [False, True])
def test_no_group_comes_after_the_seal(policy: Policy, members: list[Trajectory], read_first: bool) -> None:
    """Whether or not the learner has read the seal yet."""
    learner = started(policy, members)
    learner.seal()
    if read_first:
        learner.run_once()
    with pytest.raises(PhaseError, match="seal"):
        learner.open_group(GroupId(0, 1), [TrajectoryId(0, 1, 0)])
