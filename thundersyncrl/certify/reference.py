"""The batch reference: plain transformers, whole sequences, the textbook formula, no part of the learner.

The published gradient of one on-policy step is

    g = sum_i c_i * grad sum_t rho_it log pi(a_it | h_it)

| normalizer | c_i                                         |
| ---------- | ------------------------------------------- |
| token      | A_i / (action tokens of all trajectories)   |
| trajectory | A_i / (trajectories * own action tokens)    |
| constant   | A_i / (trajectories * constant length)      |

with rho = 1, or min(pi / behavior, cap), detached. Only the advantages are asked from the estimator. Sources: the
estimators' own.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from thundersyncrl.algorithms.estimator import CoefficientClass, GroupRewards
from thundersyncrl.certify.cases import Batch
from thundersyncrl.learner.objective import Objective
from thundersyncrl.learner.policy import Policy, make_norms_exact
from thundersyncrl.records import Trajectory, TrajectoryId

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """A step's objective as a weighted sum of log-probs."""

    coefficients: Mapping[TrajectoryId, float]
    """c_i of the trajectories that count."""
    importance_cap: float | None
    """None: rho = 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainModel:
    """A copy of the policy that knows nothing of plans, packs and prefixes."""

    model: nn.Module
    parameters: list[nn.Parameter]
    """Trained ones, in the policy's order."""
    autocast: bool
    """True: bfloat16 arithmetic over float32 weights, as the policy has it."""


def plain_copy(policy: Policy, *, dtype: torch.dtype) -> PlainModel:
    """Return a copy with transformers' own attention; in float64 its norms are exact.

    Args:
        policy: stays as it is; adapters are copied with it.
        dtype: arithmetic of the copy.
    """
    model = copy.deepcopy(policy.model)
    model.to(torch.float64 if dtype is torch.float64 else torch.float32)
    inner = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else cast(Any, model)
    inner.set_attn_implementation("sdpa")  # "eager" rounds its softmax to float32
    if dtype is torch.float64:
        make_norms_exact(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return PlainModel(model=model, parameters=parameters, autocast=dtype is torch.bfloat16)


def surrogate(objective: Objective, batch: Batch, *, baseline: float) -> Surrogate:
    """Return the coefficients c_i that the published formula gives each trajectory of a batch."""
    estimator, normalizer = objective.estimator, objective.normalizer
    compares_inside = estimator.coefficient not in (CoefficientClass.KNOWN, CoefficientClass.AFFINE_BATCH)
    smallest = estimator.min_group_size if compares_inside else 1
    groups = [[t for t in members if t.id in batch.rewards] for members in batch.groups.values()]
    groups = [g for g in groups if len(g) >= smallest]
    advantages = estimator.advantages([_rewards(g, batch) for g in groups], baseline)
    counted = [
        (group, values)
        for group, values in zip(groups, advantages, strict=True)
        if not (estimator.drops_uniform_groups and len({batch.rewards[t.id] for t in group}) == 1)
    ]
    trajectories = [t for group, _ in counted for t in group]
    num_tokens = sum(t.num_action_tokens for t in trajectories)
    late = estimator.batch_scale([values for _, values in counted]) if estimator.batch_scale is not None else 1.0
    coefficients: dict[TrajectoryId, float] = {}
    for group, values in counted:
        for trajectory, advantage in zip(group, values, strict=True):
            if normalizer.name == "token":
                divisor = num_tokens
            elif normalizer.name == "trajectory":
                divisor = len(trajectories) * trajectory.num_action_tokens
            else:
                divisor = len(trajectories) * (normalizer.constant_length or 0)
            if trajectory.num_action_tokens:
                coefficients[trajectory.id] = late * advantage / divisor
    return Surrogate(coefficients=coefficients, importance_cap=objective.importance_cap)


def _rewards(group: Sequence[Trajectory], batch: Batch) -> GroupRewards:
    return GroupRewards(
        rewards_G=tuple(batch.rewards[t.id] for t in group),
        lengths_G=tuple(t.num_action_tokens for t in group),
    )


def batch_gradients(
    plain: PlainModel,
    trajectories: Sequence[Trajectory],
    surrogates: Mapping[Key, Surrogate],
    *,
    temperature: float,
) -> dict[Key, list[Tensor]]:
    """Return the gradient of each surrogate by plain autograd, one whole sequence at a time, in the given order.

    Several surrogates share the score gradients of a sequence; each keeps one sum.
    """
    totals = {key: [torch.zeros_like(p) for p in plain.parameters] for key in surrogates}
    for trajectory in trajectories:
        wanted = {
            (key, s.importance_cap): s.coefficients[trajectory.id]
            for key, s in surrogates.items()
            if s.coefficients.get(trajectory.id, 0.0) != 0.0
        }
        for cap in {cap for _, cap in wanted}:
            score = _score_gradient(plain, trajectory, temperature, cap)
            for (key, of_cap), coefficient in wanted.items():
                if of_cap == cap:
                    torch._foreach_add_(totals[key], score, alpha=coefficient)  # pyright: ignore
    return totals


def _score_gradient(plain: PlainModel, trajectory: Trajectory, temperature: float, cap: float | None) -> list[Tensor]:
    logprobs = sequence_logprobs(plain, trajectory, temperature=temperature)
    if cap is not None:
        behavior = torch.tensor(trajectory.behavior_logprobs, dtype=logprobs.dtype, device=logprobs.device)
        logprobs = logprobs * (logprobs.detach() - behavior).exp().clamp(max=cap)
    gradient = torch.autograd.grad(logprobs.sum(), plain.parameters, allow_unused=True, materialize_grads=True)
    return list(gradient)


def sequence_logprobs(plain: PlainModel, trajectory: Trajectory, *, temperature: float) -> Tensor:
    """Return [A] log-probs of a trajectory's action tokens, from one forward over the whole sequence."""
    device = plain.parameters[0].device
    ids = torch.tensor([trajectory.token_ids], device=device)
    chosen = torch.tensor([i for i, sampled in enumerate(trajectory.action_mask) if sampled], device=device)
    with _arithmetic(plain, device):
        logits = cast(Any, plain.model)(input_ids=ids, logits_to_keep=chosen - 1, use_cache=False).logits[0]
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return scores.log_softmax(-1)[torch.arange(len(chosen), device=device), ids[0, chosen]]


def _arithmetic(plain: PlainModel, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if plain.autocast else nullcontext()
