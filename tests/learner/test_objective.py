"""What a step maximises: normalizers, token weights, reward terms, baselines, and estimators that keep their word."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from tests.learner.builders import (
    STREAMS,
    gradient_of,
    learner_of,
    plain_gradient,
    plain_logprobs,
    plain_model,
    policy_of,
    random_group,
    relative_error,
    run_step,
    trajectory,
)
from thundersyncrl.algorithms.advantages import per_group
from thundersyncrl.algorithms.estimator import CoefficientClass, Estimator
from thundersyncrl.algorithms.weights import Normalizer
from thundersyncrl.errors import CoefficientClassError, NumericsError
from thundersyncrl.learner.policy import Policy
from thundersyncrl.records import Trajectory


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A float64 policy that no test here trains."""
    return policy_of()


@pytest.mark.parametrize("stream", STREAMS)
def test_truncated_importance_weights_are_detached_factors_on_each_token(policy: Policy, stream: str) -> None:
    draw, model, cap = random.Random(6), plain_model(policy), 1.1
    members: list[Trajectory] = []
    for t in random_group(draw):
        exact = plain_logprobs(model, t).tolist()
        sampled = [p + draw.uniform(-0.3, 0.3) for p in exact]
        turns = [(turn.observation_ids, turn.action_ids) for turn in t.turns]
        members.append(trajectory(turns, member=t.id.member, logprobs=sampled))
    learner = learner_of(policy, estimator="rloo", importance_cap=cap, stream=stream)
    run_step(learner, members, [1.0, 0.0, 0.0, 0.0])
    loss = torch.zeros((), dtype=torch.float64)
    for t, advantage in zip(members, [1.0, -1 / 3, -1 / 3, -1 / 3], strict=True):
        logprobs = plain_logprobs(model, t)
        ratios = [min(math.exp(p - b), cap) for p, b in zip(logprobs.tolist(), t.behavior_logprobs, strict=True)]
        loss = loss + advantage * sum(r * p for r, p in zip(ratios, logprobs, strict=True))
    num_tokens = sum(t.num_action_tokens for t in members)
    expected = torch.autograd.grad(loss / num_tokens, list(model.parameters()))
    assert relative_error(gradient_of(learner), expected) < 1e-12


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.4])
def test_learner_and_behavior_log_probs_agree_at_every_temperature(temperature: float) -> None:
    """Case H-10: tokens scored by plain transformers at the sampling temperature give a ratio of 1."""
    policy = policy_of(dtype=torch.float32)
    model = plain_model(policy)
    members = []
    for t in random_group(random.Random(6)):
        turns = [(turn.observation_ids, turn.action_ids) for turn in t.turns]
        exact = plain_logprobs(model, t, temperature=temperature).tolist()
        members.append(trajectory(turns, member=t.id.member, logprobs=exact))
    metrics = run_step(learner_of(policy, temperature=temperature), members, [1.0, 0.0, 0.0, 0.0])
    assert 0 < metrics["mismatch_max"] < 1e-5
    assert metrics["mismatch_mean"] <= metrics["mismatch_max"]


def test_a_mismatch_above_its_bound_ends_the_step_before_any_update(policy: Policy) -> None:
    members = random_group(random.Random(6))  # behavior log-probs of 0 are far off
    learner = learner_of(policy, max_mismatch=0.01)
    with pytest.raises(NumericsError, match=r"within 0\.01 nats"):
        run_step(learner, members, [1.0, 0.0, 0.0, 0.0])
    probe: Any = learner.optimizer
    assert probe.num_steps == 0


@pytest.mark.parametrize("stream", STREAMS)
def test_detached_reward_terms_change_what_is_compared(policy: Policy, stream: str) -> None:
    members = random_group(random.Random(7))
    rewards = [1.0, 0.0, 0.5, 0.0]

    def shape(branch: Any, reward: float) -> float:
        return reward - 0.1 * len(branch.target_ids)

    shaped, plain = learner_of(policy, shape_reward=shape, stream=stream), learner_of(policy, stream=stream)
    run_step(shaped, members, rewards)
    run_step(plain, members, [r - 0.1 * t.num_action_tokens for r, t in zip(rewards, members, strict=True)])
    assert relative_error(gradient_of(shaped), gradient_of(plain)) < 1e-13


@pytest.mark.parametrize(
    ("normalizer", "divide"),
    [
        (Normalizer(name="token"), lambda t, all_: 1 / sum(x.num_action_tokens for x in all_)),
        (Normalizer(name="trajectory"), lambda t, all_: 1 / (len(all_) * t.num_action_tokens)),
        (Normalizer(name="constant", constant_length=50), lambda t, all_: 1 / (len(all_) * 50)),
    ],
    ids=["token", "trajectory", "constant"],
)
def test_each_normalizer_divides_as_published(policy: Policy, normalizer: Normalizer, divide: Any) -> None:
    members = [t for g in range(2) for t in random_group(random.Random(8 + g), group=g, size=2)]
    learner = learner_of(policy, estimator="dr_grpo", normalizer=normalizer)
    run_step(learner, members, [1.0, 0.0, 0.0, 3.0])
    model = plain_model(policy)
    loss = sum(
        a * divide(t, members) * plain_logprobs(model, t).sum()
        for a, t in zip([0.5, -0.5, -1.5, 1.5], members, strict=True)
    )
    assert relative_error(gradient_of(learner), torch.autograd.grad(loss, list(model.parameters()))) < 1e-12  # type: ignore[arg-type]


def test_the_running_mean_is_fixed_within_a_step_and_takes_all_rewards_after_it(policy: Policy) -> None:
    learner = learner_of(policy, estimator="running_mean")
    assert learner.running_mean.mean == 0.0
    run_step(learner, random_group(random.Random(0)), [1.0, 0.0, 0.0, 0.0])
    assert learner.running_mean.mean == pytest.approx(0.25)
    second = random_group(random.Random(1), step=1)
    run_step(learner, second, [1.0, 1.0, 1.0, 1.0])
    assert learner.running_mean.mean == pytest.approx(0.625)
    shifted = Estimator(
        name="shifted",
        coefficient=CoefficientClass.KNOWN,
        advantages=lambda groups, _: [[r - 0.25 for r in g.rewards_G] for g in groups],
    )
    expected = plain_gradient(policy, shifted, second, [1.0] * 4)
    assert relative_error(gradient_of(learner), expected) < 1e-12


# -- estimators that break their word ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(
    "declared",
    [CoefficientClass.AFFINE_GROUP, CoefficientClass.AFFINE_BATCH, CoefficientClass.BY_VALUE, CoefficientClass.KNOWN],
)
def test_a_wrong_declaration_raises_before_the_optimizer(
    policy: Policy, stream: str, declared: CoefficientClass
) -> None:
    """Ranks by member order: not affine, not one value per reward, and not known from the own reward."""
    ranked = per_group(lambda group: [float(i * i) for i in range(len(group.rewards_G))])
    learner = learner_of(
        policy, estimator=Estimator(name="liar", coefficient=declared, advantages=ranked), stream=stream
    )
    with pytest.raises(CoefficientClassError, match="declare"):
        run_step(learner, random_group(random.Random(0)), [1.0, 0.5, 0.0, 0.0])
    probe: Any = learner.optimizer
    assert probe.num_steps == 0


def test_the_same_estimator_declared_arbitrary_is_exact(policy: Policy) -> None:
    ranked = Estimator(
        name="honest",
        coefficient=CoefficientClass.ARBITRARY,
        advantages=per_group(lambda group: [float(i * i) for i in range(len(group.rewards_G))]),
    )
    members, rewards = random_group(random.Random(0)), [1.0, 0.5, 0.0, 0.0]
    learner = learner_of(policy, estimator=ranked)
    run_step(learner, members, rewards)
    assert relative_error(gradient_of(learner), plain_gradient(policy, ranked, members, rewards)) < 1e-12
