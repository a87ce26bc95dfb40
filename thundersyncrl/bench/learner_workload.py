"""The workload of `bench learner`: a random model, random groups, and plain packed and padded gradients of them.

8 groups of 8 trajectories under prompts of 256 tokens; three turns of 40-80 action and 40-80 observation tokens, so
that a last observation follows the last action, as when the limit of turns cuts a trajectory. The model is a random
Qwen3 of 5.25 M parameters (4 layers, width 256, MLP 768, 4 query and 2 key/value heads of 64, vocabulary 4096,
untied), float32.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thundersyncrl.learner.attention import Branch, PackPlan
from thundersyncrl.learner.policy import Policy, make_norms_exact
from thundersyncrl.learner.scoring import token_logprobs
from thundersyncrl.records import Outcome, Status, Task, Trajectory, TrajectoryId, Turn

VOCABULARY, GROUP_SIZE, PROMPT, TURNS = 4096, 8, 256, 3
Item = tuple[Trajectory, float]
"""A trajectory and its reward."""


def make_model() -> Any:
    """Return the model under transformers' own attention; the same weights each time."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def make_items(num_groups: int, *, last_observation: bool = True, seed: int = 0) -> list[Item]:
    """Return trajectories and rewards, group by group; without the last observation all end with an action."""
    draw = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(low, high)))

    items: list[Item] = []
    for group in range(num_groups):
        prompt = tokens(PROMPT, PROMPT)
        for member in range(GROUP_SIZE):
            turns = [_turn(prompt if k == 0 else tokens(40, 80), tokens(40, 80)) for k in range(TURNS)]
            if last_observation:
                turns.append(_turn(tokens(40, 80), ()))
            trajectory = Trajectory(
                id=TrajectoryId(0, group, member),
                task=Task(id=f"task-{group}", instruction=""),
                turns=tuple(turns),
                outcome=Outcome(status=Status.TRUNCATED, cause="turns"),
            )
            items.append((trajectory, draw.random()))
    return items


def _turn(observation: tuple[int, ...], action: tuple[int, ...]) -> Turn:
    return Turn(observation_ids=observation, action_ids=action, behavior_logprobs=(0.0,) * len(action), version=0)


def half_uniform(items: Sequence[Item]) -> list[Item]:
    """Return the items with equal rewards in every other group."""
    return [(t, 1.0 if t.id.group % 2 else reward) for t, reward in items]


def advantages(items: Sequence[Item]) -> list[float]:
    """Return GRPO's advantages, in the items' order."""
    values: list[float] = []
    for start in range(0, len(items), GROUP_SIZE):
        rewards = [r for _, r in items[start : start + GROUP_SIZE]]
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        values += [(r - mean) / (deviation + 1e-4) for r in rewards]
    return values


def padded_gradient(model: Any, items: Sequence[Item]) -> list[Tensor]:
    """Return the gradient by plain transformers: one group a micro-batch, right-padded, all logits."""
    model.zero_grad()
    coefficients = torch.tensor(advantages(items))
    for start in range(0, len(items), GROUP_SIZE):
        rows = [t for t, _ in items[start : start + GROUP_SIZE]]
        longest = max(len(t.token_ids) for t in rows)
        ids = torch.tensor([_filled(t.token_ids, longest) for t in rows])
        seen = torch.tensor([_filled([1] * len(t.token_ids), longest) for t in rows])
        mask = torch.tensor([_filled([float(m) for m in t.action_mask], longest) for t in rows])[:, 1:]
        logits = model(input_ids=ids, attention_mask=seen).logits[:, :-1]
        logprobs = -nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        (logprobs * mask * coefficients[start : start + GROUP_SIZE, None]).sum().backward()
    return _scaled_gradient(model, items)


def _filled(values: Sequence[float], width: int) -> list[float]:
    return [*values, *[0] * (width - len(values))]


def packed_gradient(policy: Policy, items: Sequence[Item], budget: int = 2048) -> list[Tensor]:
    """Return the gradient by whole trajectories side by side: no padding, scored positions only, no shared prompt."""
    policy.model.zero_grad()
    packs: list[list[tuple[Trajectory, float]]] = [[]]
    for (trajectory, _), coefficient in zip(items, advantages(items), strict=True):
        used = sum(len(t.token_ids) for t, _ in packs[-1])
        if packs[-1] and used + len(trajectory.token_ids) > budget:
            packs.append([])
        packs[-1].append((trajectory, coefficient))
    for pack in packs:
        _backward_packed(policy, pack)
    return _scaled_gradient(policy.model, items)


def _backward_packed(policy: Policy, pack: Sequence[tuple[Trajectory, float]]) -> None:
    ids: list[int] = []
    positions: list[int] = []
    scored: list[int] = []
    weights: list[float] = []
    spans: list[Branch] = []
    for trajectory, coefficient in pack:
        start = len(ids)
        ids += trajectory.token_ids
        positions += range(len(trajectory.token_ids))
        here = [start + i - 1 for i, sampled in enumerate(trajectory.action_mask) if sampled]
        scored += here
        weights += [coefficient] * len(here)
        spans.append(Branch(start=start, end=len(ids), prefix=None))
    hidden = policy.hidden(torch.tensor([ids]), torch.tensor([positions]), PackPlan(spans))[0]
    targets = torch.tensor(ids)[torch.tensor(scored) + 1]
    logprobs = token_logprobs(policy, hidden[torch.tensor(scored)], targets, 1.0)
    (logprobs * torch.tensor(weights, dtype=logprobs.dtype)).sum().backward()


def reference_gradient(items: Sequence[Item]) -> list[Tensor]:
    """Return the gradient in float64, one trajectory at a time, by plain transformers."""
    model = make_model().double()
    make_norms_exact(model)
    for (trajectory, _), coefficient in zip(items, advantages(items), strict=True):
        ids = torch.tensor([trajectory.token_ids])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        (coefficient * logprobs[torch.tensor(trajectory.action_mask[1:])].sum()).backward()
    return _scaled_gradient(model, items)


def _scaled_gradient(model: Any, items: Sequence[Item]) -> list[Tensor]:
    count = sum(t.num_action_tokens for t, _ in items)
    return [p.grad.detach() / count for p in model.parameters()]


def relative_error(gradient: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return |gradient - expected| / |expected| over all parameters."""
    difference = sum(float((g.double() - e).square().sum()) for g, e in zip(gradient, expected, strict=True))
    return (difference / sum(float(e.square().sum()) for e in expected)) ** 0.5
