"""Law: how a step is split and permuted changes nothing but the order of floating-point sums."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.learner.builders import (
    gradient_of,
    learner_of,
    open_step,
    plain_logprobs,
    plain_model,
    policy_of,
    random_group,
    relative_error,
    run_step,
    trajectory,
    work,
)
from thundersyncrl.algorithms.estimator import CoefficientClass, Estimator
from thundersyncrl.learner.policy import Policy
from thundersyncrl.records import Trajectory, TrajectoryId


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.set_num_threads(1)
    return policy_of(dtype=torch.float32)


def largest(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def reward_of(id: TrajectoryId) -> float:
    return float((id.group * 7 + id.member * 3) % 5) / 4


ONES = Estimator(
    name="ones",
    coefficient=CoefficientClass.KNOWN,
    advantages=lambda groups, _: [[1.0] * len(g.rewards_G) for g in groups],
    min_group_size=1,
)


@pytest.mark.parametrize("stream", ["batch", "group", "trajectory"])
@pytest.mark.parametrize("pack_tokens", [1, 4, 12, 1000])
def test_a_token_mean_is_no_mean_of_means(policy: Policy, stream: str, pack_tokens: int) -> None:
    """Case H-09: sequences of 1 and 9 tokens weigh 1 to 9 however the step is split, never 1 to 1."""
    draw = random.Random(0)
    short = trajectory([([1, 2], [3])], group=0)
    long = trajectory([([1, 2], [draw.randrange(40) for _ in range(9)])], group=1)
    model = plain_model(policy)
    parameters = list(model.parameters())
    apart = [torch.autograd.grad(plain_logprobs(model, t).sum(), parameters) for t in (short, long)]
    right = [(a + b) / 10 for a, b in zip(*apart, strict=True)]
    faulty = [(a + b / 9) / 2 for a, b in zip(*apart, strict=True)]
    for members in ([short, long], [long, short]):
        learner = learner_of(policy, estimator=ONES, stream=stream, pack_tokens=pack_tokens)
        run_step(learner, members, [1.0, 1.0])
        assert largest(gradient_of(learner), [r.float() for r in right]) < 1e-6
        assert relative_error(gradient_of(learner), faulty) > 0.1


def gradient(policy: Policy, members: Sequence[Trajectory], *, order: int, **limits: int | str) -> list[Tensor]:
    learner = learner_of(policy, estimator="rloo", **limits)
    open_step(learner, members)
    draw = random.Random(order)
    for t in draw.sample(members, len(members)):
        learner.text(t)
        if order % 2:
            work(learner)
    for t in draw.sample(members, len(members)):
        learner.reward(t.id, reward_of(t.id))
        if order % 3:
            work(learner)
    learner.seal()
    work(learner)
    learner.finish_step()
    return gradient_of(learner)


def test_splits_into_packs_of_any_size_agree(policy: Policy) -> None:
    """Accumulation over 1, 2, 4 and more packs."""
    members = [t for g in range(3) for t in random_group(random.Random(4), group=g)]
    whole = gradient(policy, members, order=0, stream="batch", pack_tokens=10_000)
    for pack_tokens in (1, 10, 20, 40):
        split = gradient(policy, members, order=0, stream="batch", pack_tokens=pack_tokens)
        assert largest(split, whole) < 1e-6
        assert relative_error(split, whole) < 2e-6


@pytest.mark.parametrize("stream", ["batch", "group", "trajectory"])
def test_permuted_arrivals_agree(policy: Policy, stream: str) -> None:
    members = [t for g in range(3) for t in random_group(random.Random(5), group=g)]
    first = gradient(policy, members, order=0, stream=stream)
    for order in range(1, 9):
        assert relative_error(gradient(policy, members, order=order, stream=stream), first) < 2e-6


def test_renamed_groups_and_members_agree(policy: Policy) -> None:
    """Identity is a name: no coefficient depends on it."""
    draw = random.Random(6)
    members = [t for g in range(2) for t in random_group(draw, group=g)]
    rewards = {t.id: draw.choice([0.0, 0.25, 1.0]) for t in members}
    renamed: list[Trajectory] = []
    renamed_rewards: dict[TrajectoryId, float] = {}
    for t in members:
        turns = [(turn.observation_ids, turn.action_ids) for turn in t.turns]
        other = trajectory(turns, group=1 - t.id.group, member=(t.id.member + 2) % 4)
        renamed.append(other)
        renamed_rewards[other.id] = rewards[t.id]
    first, second = learner_of(policy, estimator="opo"), learner_of(policy, estimator="opo")
    run_step(first, members, rewards)
    run_step(second, renamed, renamed_rewards)
    assert relative_error(gradient_of(second), gradient_of(first)) < 2e-6
