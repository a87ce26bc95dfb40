"""Log-probs of action tokens: packs of branches run against their prompts, scored only where a token was sampled.

Shapes: P prefix tokens, T tokens of the pack, A scored tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from thundersyncrl.learner.attention import Branch, PackPlan, Prefix, PrefixPlan
from thundersyncrl.learner.branch import BranchTokens
from thundersyncrl.learner.policy import Policy
from thundersyncrl.records import GroupId

LOGIT_BYTES = 1 << 27
"""Largest rectangle of logits that is held at once; more positions are scored in chunks and recomputed backward."""


def token_logprobs(policy: Policy, hidden: Tensor, target_ids: Tensor, temperature: float) -> Tensor:
    """Return log pi(target | hidden) under the tempered distribution, in at least float32.

    log softmax(logits / temperature)[target]: the temperature divides logits, since that is what was sampled from.

    Args:
        policy: its head turns hidden states into logits.
        hidden: [A, D]
        target_ids: [A]
        temperature: positive; 1 leaves the logits as they are.

    Returns:
        [A] nats, each <= 0.
    """
    itemsize = 8 if policy.compute_dtype is torch.float64 else 4
    rows = max(1, LOGIT_BYTES // (policy.vocab_size * itemsize))
    score = partial(_logprobs_of_chunk, policy, temperature)
    if hidden.shape[0] <= rows:
        return score(hidden, target_ids)
    chunks = [
        checkpoint(score, h, t, use_reentrant=False)
        for h, t in zip(hidden.split(rows), target_ids.split(rows), strict=True)
    ]
    return torch.cat(chunks)


def _logprobs_of_chunk(policy: Policy, temperature: float, hidden: Tensor, target_ids: Tensor) -> Tensor:
    logits = policy.logits(hidden)
    if temperature != 1.0:
        logits = logits / temperature
    # relative to the largest: a log-sum-exp near 20 would be rounded to 2e-6 before it is subtracted
    logits = logits - logits.detach().amax(dim=-1, keepdim=True)
    chosen = logits.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.exp().sum(dim=-1).log()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The log-probs of one branch's action tokens."""

    branch: BranchTokens
    logprobs: Tensor
    """[A] nats, with graph unless the pack ran without gradient."""


def run_prefix(policy: Policy, token_ids: Sequence[int]) -> tuple[Prefix, tuple[Tensor, ...]]:
    """Run a prompt and return its detached keys and values, and the same [2 L] tensors with their graph."""
    ids = torch.tensor([token_ids], dtype=torch.long, device=policy.device)
    positions = torch.arange(len(token_ids), device=policy.device).unsqueeze(0)
    plan = PrefixPlan()
    policy.hidden(ids, positions, plan)
    live = (*plan.keys_L, *plan.values_L)
    leaves = [t.detach().requires_grad_(torch.is_grad_enabled()) for t in live]
    num_layers = len(plan.keys_L)
    return Prefix(keys_L=tuple(leaves[:num_layers]), values_L=tuple(leaves[num_layers:])), live


def score_pack(
    policy: Policy,
    branches: Sequence[BranchTokens],
    prefixes: Mapping[GroupId, Prefix | None],
    *,
    temperature: float,
) -> list[Scores]:
    """Return the log-probs of every branch of a pack, run side by side without padding.

    Args:
        policy: at the version that sampled the branches.
        branches: each with at least one token.
        prefixes: the prompt of each branch's group; None where the prompt is a single token.
        temperature: of the sampling distribution.
    """
    ids: list[int] = []
    positions: list[int] = []
    scored: list[int] = []
    spans: list[Branch] = []
    for branch in branches:
        start = len(ids)
        ids += branch.input_ids
        positions += range(len(branch.prefix_ids), len(branch.prefix_ids) + branch.num_tokens)
        scored += [start + index for index in branch.scored]
        spans.append(Branch(start=start, end=len(ids), prefix=prefixes[branch.id.group_id]))
    device = policy.device
    hidden = policy.hidden(
        torch.tensor([ids], device=device), torch.tensor([positions], device=device), PackPlan(spans)
    )[0]
    targets = torch.tensor([t for b in branches for t in b.target_ids], device=device)
    logprobs = token_logprobs(policy, hidden[torch.tensor(scored, device=device)], targets, temperature)
    parts = logprobs.split([len(b.target_ids) for b in branches])
    return [Scores(branch=b, logprobs=p) for b, p in zip(branches, parts, strict=True)]
