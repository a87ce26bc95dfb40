"""A group's prompt: run forward once, walked backward once with the summed adjoints of its branches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thundersyncrl.learner.attention import Prefix
from thundersyncrl.learner.policy import Policy
from thundersyncrl.learner.scoring import run_prefix


class Prompt:
    """Keys and values of a shared prompt, cut from their graph.

    With `keep_graph` the forward's graph waits for the walk; without, the walk runs the forward again, which costs one
    more forward and no memory in between. Both give the same gradient.
    """

    def __init__(self, policy: Policy, token_ids: Sequence[int], *, keep_graph: bool):
        self._policy = policy
        self.token_ids = tuple(token_ids)
        self.num_forwards = 1
        if keep_graph:
            self.prefix, self._live = run_prefix(policy, token_ids)
            return
        with torch.no_grad():
            cut, _ = run_prefix(policy, token_ids)
        num_layers = len(cut.keys_L)
        leaves = tuple(t.requires_grad_(True) for t in cut.leaves)
        self.prefix = Prefix(keys_L=leaves[:num_layers], values_L=leaves[num_layers:])
        self._live = ()

    @property
    def keeps_graph(self) -> bool:
        return bool(self._live)

    def walk(self, adjoints: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient that reaches `parameters` through this prompt; frees the graph.

        Args:
            adjoints: [2 L] gradient on each key and value tensor, already combined with the coefficients.
            parameters: trained tensors.
        """
        live = self._live
        if not live:
            _, live = run_prefix(self._policy, self.token_ids)
            self.num_forwards += 1
        self._live = ()
        # the first layer's keys and values carry no graph when only later adapters are trained
        pairs = [(t, a.to(t.dtype)) for t, a in zip(live, adjoints, strict=True) if t.requires_grad]
        gradients = torch.autograd.grad(
            [t for t, _ in pairs], parameters, [a for _, a in pairs], allow_unused=True, materialize_grads=True
        )
        return list(gradients)
