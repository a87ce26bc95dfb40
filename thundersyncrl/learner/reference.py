"""The reference policy of the KL term: the model as it was before training."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch

from thundersyncrl.learner.branch import BranchTokens
from thundersyncrl.learner.policy import Policy
from thundersyncrl.learner.scoring import run_prefix, score_pack


class ReferencePolicy:
    """Scores a trajectory under the frozen model: the base under its adapters, or a copy for full fine-tuning."""

    def __init__(self, policy: Policy):
        self._has_adapters = hasattr(policy.model, "disable_adapter")
        self._policy = policy if self._has_adapters else _frozen_copy(policy)

    def _frozen(self) -> Any:
        return self._policy.model.disable_adapter() if self._has_adapters else nullcontext()  # pyright: ignore

    @torch.no_grad()
    def logprobs(self, branch: BranchTokens, *, temperature: float) -> list[float]:
        """Return the [A] log-probs of a trajectory's action tokens, in nats."""
        if not branch.target_ids:
            return []
        with self._frozen():
            prefix = run_prefix(self._policy, branch.prefix_ids)[0] if branch.prefix_ids else None
            scores = score_pack(self._policy, [branch], {branch.id.group_id: prefix}, temperature=temperature)
        return [float(p) for p in scores[0].logprobs]


def _frozen_copy(policy: Policy) -> Policy:
    model = copy.deepcopy(policy.model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Policy(
        model=model,
        decoder=model.get_decoder(),  # pyright: ignore
        head=model.get_output_embeddings(),  # pyright: ignore
        compute_dtype=policy.compute_dtype,
    )
