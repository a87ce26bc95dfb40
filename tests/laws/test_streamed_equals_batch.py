"""Law: whatever the level, the arrival order and the way work is cut, the update is that of plain batch training.

The reference is one autograd call over one loss of plain transformers over whole sequences (`plain_gradient`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.learner.builders import (
    STREAMS,
    VOCABULARY,
    gradient_of,
    learner_of,
    open_step,
    plain_gradient,
    policy_of,
    random_group,
    relative_error,
    work,
)
from tests.toys import tiny_model
from thundersyncrl.algorithms.estimator import RewardDomain, estimator_names, get_estimator
from thundersyncrl.config import LearnerConfig, LoraConfig
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.optimizer import PolicyOptimizer
from thundersyncrl.learner.policy import Policy, make_policy
from thundersyncrl.records import Trajectory, TrajectoryId

EXACT = 1e-12
SLOW_IS_FINE = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.fixture(scope="module")
def policies() -> dict[tuple[str, str], Policy]:
    """float64, by family and kind of training; nothing here steps them."""
    torch.set_num_threads(1)
    kinds: dict[str, LoraConfig | None] = {
        "full": None,
        "all adapters": LoraConfig(rank=2),
        "late adapters": LoraConfig(rank=2, targets=("down_proj",)),
    }
    families: tuple[Any, ...] = ("llama", "qwen2", "qwen3")
    return {(f, kind): policy_of(f, lora=lora) for f in families for kind, lora in kinds.items()}


def rewards_for(name: str, draw: random.Random, ids: Sequence[TrajectoryId]) -> dict[TrajectoryId, float]:
    """Return rewards of the estimator's domain: few values, many values, or equal ones."""
    if get_estimator(name).reward_domain is RewardDomain.BINARY:
        return {id: float(draw.random() < 0.3) for id in ids}
    kind = draw.choice(["few", "many", "offset", "equal"])
    values = {
        "few": lambda: draw.choice([0.0, 1.0, 0.5]),
        "many": draw.random,
        "offset": lambda: 100.0 + draw.random(),
        "equal": lambda: 1.0,
    }
    return {id: values[kind]() for id in ids}


def stream(
    learner: Learner, trajectories: Sequence[Trajectory], rewards: dict[TrajectoryId, float], draw: random.Random
) -> dict[str, float]:
    """Run a step with events in a random order; members without a reward are lost at some moment."""
    open_step(learner, trajectories)
    texts, ends = list(trajectories), list[Trajectory]()
    draw.shuffle(texts)
    said = dict.fromkeys((t.id for t in texts), 0)
    eagerness, sealed = draw.random(), False
    while texts or ends or not sealed:
        choice = draw.random()
        if not sealed and choice < 0.1:
            learner.seal()
            sealed = True
        elif texts and choice < 0.4:
            hand_over_a_turn(learner, draw.choice(texts), trajectories, said, draw)
        elif texts and choice < 0.7:
            t = texts.pop()
            if t.id in rewards or draw.random() < 0.5:
                learner.text(t)
            ends.append(t)
        elif ends:
            t = ends.pop(draw.randrange(len(ends)))
            if t.id in rewards:
                learner.reward(t.id, rewards[t.id])
            else:
                learner.lose(t.id)
        while learner.has_work and draw.random() < eagerness:
            learner.run_once()
    work(learner)
    return learner.finish_step()


def hand_over_a_turn(
    learner: Learner,
    t: Trajectory,
    trajectories: Sequence[Trajectory],
    said: dict[TrajectoryId, int],
    draw: random.Random,
) -> None:
    """Hand over the next turn of a live trajectory; at times it starts afresh, after turns that were a sibling's."""
    hint = draw.choice([None, 1.0, 3.0])
    if draw.random() < 0.15:
        siblings = [s for s in trajectories if s.id.group_id == t.id.group_id]
        learner.turn(t.id, draw.choice(siblings).turns, expected_turns=hint)
        said[t.id] = 0
    elif said[t.id] < len(t.turns):
        said[t.id] += 1
        learner.turn(t.id, t.turns[: said[t.id]], expected_turns=hint)


@SLOW_IS_FINE
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(estimator_names()),
    level=st.sampled_from(STREAMS),
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    kind=st.sampled_from(["full", "all adapters", "late adapters"]),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    prompt=st.integers(1, 6),
    loss_rate=st.sampled_from([0.0, 0.2, 0.6]),
    limits=st.fixed_dictionaries(
        {
            "pack_tokens": st.sampled_from([1, 15, 1000]),
            "graph_tokens": st.sampled_from([0, 6, 1000]),
            "max_open_groups": st.sampled_from([1, 2, 64]),
        }
    ),
)
def test_any_order_and_any_cut_of_the_work_give_the_batch_gradient(
    policies: dict[tuple[str, str], Policy],
    seed: int,
    name: str,
    level: str,
    family: str,
    kind: str,
    sizes: list[int],
    prompt: int,
    loss_rate: float,
    limits: dict[str, int],
) -> None:
    draw = random.Random(seed)
    needed = get_estimator(name).min_group_size
    groups = [random_group(draw, group=g, size=max(n, needed), prompt=prompt) for g, n in enumerate(sizes)]
    members = [t for group in groups for t in group]
    alive = [t.id for t in members if draw.random() >= loss_rate]
    rewards = rewards_for(name, draw, alive)
    policy = policies[family, kind]
    learner = learner_of(policy, estimator=name, stream=level, **limits)
    metrics = stream(learner, members, rewards, draw)
    expected = plain_gradient(policy, get_estimator(name), members, rewards)
    assert relative_error(gradient_of(learner), expected) < EXACT
    assert metrics["num_survivors"] + metrics["num_dropped"] == len(alive)
    assert metrics["num_lost"] == len(members) - len(alive)


@pytest.mark.parametrize("name", estimator_names())
@pytest.mark.parametrize("level", STREAMS)
def test_every_estimator_has_a_signal_and_streams_exactly(
    policies: dict[tuple[str, str], Policy], name: str, level: str
) -> None:
    """One success in six, two groups, full fine-tuning: no reference here is zero."""
    draw = random.Random(11)
    members = [t for g in range(2) for t in random_group(draw, group=g, size=6)]
    rewards = {t.id: float(t.id.member == 2) for t in members}
    policy = policies["llama", "full"]
    expected = plain_gradient(policy, get_estimator(name), members, rewards)
    assert float(torch.stack([g.norm() for g in expected]).norm()) > 1e-4
    for order in range(2):
        learner = learner_of(policy, estimator=name, stream=level, pack_tokens=30)
        stream(learner, members, rewards, random.Random(order))
        assert relative_error(gradient_of(learner), expected) < EXACT


def test_the_same_arrivals_give_the_same_bits(policies: dict[tuple[str, str], Policy]) -> None:
    members = [t for g in range(2) for t in random_group(random.Random(1), group=g)]
    rewards = rewards_for("grpo", random.Random(2), [t.id for t in members])
    gradients: list[list[Tensor]] = []
    for _ in range(2):
        learner = learner_of(policies["qwen3", "full"])
        stream(learner, members, rewards, random.Random(3))
        gradients.append(gradient_of(learner))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp", "leave_one_out_std"])
def test_twenty_steps_of_adamw_end_at_the_same_weights(name: str) -> None:
    """With decay, clipping, a schedule, and equal rewards and lost members on the way."""
    ends = {level: _trained(name, level) for level in STREAMS}
    start = make_policy(tiny_model(vocab_size=VOCABULARY), dtype=torch.float64).trained.values()
    for level in ("group", "trajectory", "turn", "auto"):
        for streamed, batch in zip(ends[level], ends["batch"], strict=True):
            assert float((streamed - batch).abs().max()) <= 1e-8
    assert max(float((a - b).detach().abs().max()) for a, b in zip(ends["batch"], start, strict=True)) > 1e-3


def _trained(name: str, level: str) -> list[Tensor]:
    policy = make_policy(tiny_model(vocab_size=VOCABULARY), dtype=torch.float64)
    config = LearnerConfig(learning_rate=1e-3, weight_decay=0.1, schedule="cosine", warmup_steps=3, max_grad_norm=0.5)
    learner = learner_of(
        policy,
        estimator=name,
        stream=level,
        pack_tokens=40,
        optimizer=PolicyOptimizer(policy.trained, config, total_steps=20),
    )
    steps, arrival = random.Random(5), random.Random(level)
    for step in range(20):
        members = [t for g in range(2) for t in random_group(steps, group=g, size=4, step=step)]
        alive = [t.id for t in members if steps.random() < 0.95]
        rewards = {id: steps.choice([0.0, 0.5, 1.0]) for id in alive}
        if step == 7:
            rewards = dict.fromkeys(rewards, 0.0)
        metrics = stream(learner, members, rewards, arrival)
        assert metrics["num_lost"] == len(members) - len(alive)
    assert learner.version == 20
    return [p.detach() for p in policy.trained.values()]
