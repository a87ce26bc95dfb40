"""Builders for learner tests: trajectories from plain lists, a learner whose gradient can be read, plain references."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.toys import tiny_model
from thundersyncrl.algorithms.estimator import Estimator, GroupRewards, get_estimator
from thundersyncrl.algorithms.weights import Normalizer
from thundersyncrl.config import LoraConfig
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.objective import Objective, WorkLimits
from thundersyncrl.learner.policy import Policy, make_norms_exact, make_policy
from thundersyncrl.records import Outcome, Status, Task, Trajectory, TrajectoryId, Turn

VOCABULARY = 40
STREAMS = ("batch", "group", "trajectory", "turn", "auto")
Turns = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(observation ids, action ids) of each turn."""


def trajectory(
    turns: Turns,
    *,
    group: int = 0,
    member: int = 0,
    step: int = 0,
    version: int = 0,
    logprobs: Sequence[float] | None = None,
) -> Trajectory:
    """Return a completed trajectory; behavior log-probs are zeros unless given for all action tokens."""
    given = list(logprobs if logprobs is not None else [0.0] * sum(len(acted) for _, acted in turns))
    records: list[Turn] = []
    for observed, acted in turns:
        own, given = given[: len(acted)], given[len(acted) :]
        records.append(
            Turn(
                observation_ids=tuple(observed), action_ids=tuple(acted), behavior_logprobs=tuple(own), version=version
            )
        )
    return Trajectory(
        id=TrajectoryId(step, group, member),
        task=Task(id=f"task-{group}", instruction=""),
        turns=tuple(records),
        outcome=Outcome(status=Status.COMPLETED),
    )


def random_group(
    draw: random.Random, *, group: int = 0, size: int = 4, prompt: int = 5, max_turns: int = 3, step: int = 0
) -> list[Trajectory]:
    """Return a group with a shared random prompt and ragged turns."""

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(draw.randint(low, high))]

    shared = tokens(prompt, prompt)
    members: list[Trajectory] = []
    for member in range(size):
        turns = [(shared if k == 0 else tokens(1, 3), tokens(1, 4)) for k in range(draw.randint(1, max_turns))]
        members.append(trajectory(turns, group=group, member=member, step=step, version=step))
    return members


def policy_of(
    family: Any = "llama", *, dtype: torch.dtype = torch.float64, lora: LoraConfig | None = None, seed: int = 0
) -> Policy:
    """Return a tiny policy; adapters, if any, are random in both halves."""
    policy = make_policy(tiny_model(family, vocab_size=VOCABULARY, seed=seed), dtype=dtype, lora=lora)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.trained.items():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.1)
    return policy


class Probe:
    """Stands in for the optimizer: keeps the settled gradient, leaves the parameters."""

    learning_rate = 0.0

    def __init__(self) -> None:
        self.gradient: list[Tensor] = []
        self.num_steps = 0

    def ascend(self, gradient: Sequence[Tensor]) -> float:
        self.gradient = [g.clone() for g in gradient]
        self.num_steps += 1
        return 0.0


def learner_of(
    policy: Policy,
    *,
    estimator: str | Estimator = "grpo",
    normalizer: Normalizer | None = None,
    optimizer: Any = None,
    temperature: float = 1.0,
    importance_cap: float | None = None,
    shape_reward: Any = None,
    **limits: Any,
) -> Learner:
    """Return a learner; without an optimizer it gets a probe, and without a normalizer the token mean."""
    objective = Objective(
        estimator=get_estimator(estimator) if isinstance(estimator, str) else estimator,
        normalizer=normalizer or Normalizer(name="token"),
        temperature=temperature,
        importance_cap=importance_cap,
        shape_reward=shape_reward,
    )
    return Learner(policy, objective, WorkLimits(**{"early_tokens": 1, **limits}), optimizer or Probe())


def open_step(learner: Learner, trajectories: Sequence[Trajectory]) -> None:
    """Begin a step and announce the groups of these trajectories."""
    learner.begin_step()
    for group in dict.fromkeys(t.id.group_id for t in trajectories):
        learner.open_group(group, [t.id for t in trajectories if t.id.group_id == group])


def work(learner: Learner) -> None:
    """Run the learner until it has nothing to do."""
    while learner.has_work:
        learner.run_once()


def run_step(
    learner: Learner, trajectories: Sequence[Trajectory], rewards: Mapping[TrajectoryId, float] | Sequence[float]
) -> dict[str, float]:
    """Run a step in which every text is worked on before its reward comes; members without a reward are lost."""
    by_id = _by_id(trajectories, rewards)
    open_step(learner, trajectories)
    for t in trajectories:
        learner.text(t)
        work(learner)
    for t in trajectories:
        if t.id in by_id:
            learner.reward(t.id, by_id[t.id])
        else:
            learner.lose(t.id)
        work(learner)
    learner.seal()
    work(learner)
    return learner.finish_step()


def _by_id(
    trajectories: Sequence[Trajectory], rewards: Mapping[TrajectoryId, float] | Sequence[float]
) -> Mapping[TrajectoryId, float]:
    if isinstance(rewards, Mapping):
        return rewards
    return {t.id: r for t, r in zip(trajectories, rewards, strict=True)}


def gradient_of(learner: Learner) -> list[Tensor]:
    """Return what the probe of a learner saw; zeros where nothing carried a signal."""
    probe: Any = learner.optimizer
    return probe.gradient or [torch.zeros_like(p) for p in learner.policy.trained.values()]


def plain_logprobs(model: Any, t: Trajectory, *, temperature: float = 1.0) -> Tensor:
    """Return [A] log-probs of the action tokens from one plain forward over the whole sequence."""
    ids = torch.tensor([t.token_ids])
    logprobs = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return chosen[torch.tensor(t.action_mask[1:])]


def plain_model(policy: Policy) -> Any:
    """Return a float64 copy under transformers' own attention, with exact norms."""
    model: Any = copy.deepcopy(policy.model).double()
    (model.get_base_model() if hasattr(model, "get_base_model") else model).set_attn_implementation("sdpa")
    make_norms_exact(model)
    return model


def plain_gradient(
    policy: Policy,
    estimator: Estimator,
    trajectories: Sequence[Trajectory],
    rewards: Mapping[TrajectoryId, float] | Sequence[float],
    *,
    temperature: float = 1.0,
) -> list[Tensor]:
    """Return the token-mean gradient of the whole batch's objective, by one autograd call over one loss."""
    by_id = _by_id(trajectories, rewards)
    groups = [
        [t for t in trajectories if t.id.group_id == g and t.id in by_id]
        for g in dict.fromkeys(t.id.group_id for t in trajectories)
    ]
    compares = estimator.coefficient.value not in ("known", "affine_batch")
    groups = [g for g in groups if len(g) >= (estimator.min_group_size if compares else 1)]
    advantages = estimator.advantages(
        [
            GroupRewards(rewards_G=tuple(by_id[t.id] for t in g), lengths_G=tuple(t.num_action_tokens for t in g))
            for g in groups
        ],
        0.0,
    )
    if estimator.drops_uniform_groups:
        kept = [i for i, g in enumerate(groups) if len({by_id[t.id] for t in g}) > 1]
        groups, advantages = [groups[i] for i in kept], [advantages[i] for i in kept]
    model = plain_model(policy)
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = torch.zeros((), dtype=torch.float64)
    for group, values in zip(groups, advantages, strict=True):
        for t, advantage in zip(group, values, strict=True):
            if t.num_action_tokens:
                loss = loss + advantage * plain_logprobs(model, t, temperature=temperature).sum()
    scale = estimator.batch_scale(advantages) if estimator.batch_scale else 1.0
    loss = loss * scale / max(sum(t.num_action_tokens for g in groups for t in g), 1)
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


def relative_error(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return |left - right| / |right| over all tensors; the plain distance where right is zero."""
    distance = torch.stack([(a.double() - b.double()).norm() for a, b in zip(left, right, strict=True)]).norm()
    size = torch.stack([b.double().norm() for b in right]).norm()
    return float(distance / size) if float(size) else float(distance)
