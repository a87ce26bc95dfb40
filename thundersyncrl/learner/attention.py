"""Attention under a plan: each caller says what every token may see, and the model's own code stays as it is.

A Hugging Face model that is loaded with `attn_implementation = ATTENTION` hands its queries, keys and values (after
rotary embedding) to the plan that was given to `forward`. Attention without a plan is an error, so that nothing can
run with the wrong visibility.

Shapes: B batch, H query heads, N key/value heads, T tokens, S keys, P prefix tokens, D head width, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from thundersyncrl.errors import PhaseError

ATTENTION = "thundersync"


class AttentionPlan(Protocol):
    """Says what the tokens of one forward may see."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return the attention output of one layer.

        Args:
            layer: index of the layer, from 0.
            query: [B, H, T, D] with rotary embedding applied.
            key: [B, N, T, D] likewise.
            value: [B, N, T, D].
            scaling: factor on the logits.

        Returns:
            [B, T, H, D]
        """
        ...


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    **_: Any,  # transformers passes dropout, position ids and flags that no plan needs
) -> tuple[Tensor, None]:
    if plan is None:
        raise PhaseError(
            f"expected a forward under an attention plan, got one without; call `Policy.hidden`, or load the model "
            f"with another attention than {ATTENTION!r} to use it alone"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return plan.attend(int(module.layer_idx), query, key, value, scale), None  # pyright: ignore[reportArgumentType]


AttentionInterface.register(ATTENTION, _attend)


def expand_heads(states: Tensor, num_heads: int) -> Tensor:
    """Return keys or values [B, N, S, D] repeated to [B, H, S, D], each for its block of query heads."""
    repeats = num_heads // states.shape[1]
    return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)


@dataclass(slots=True, kw_only=True)
class PrefixPlan:
    """Plain causal attention over one sequence, keeping every layer's keys and values for its branches."""

    keys_L: list[Tensor] = field(default_factory=list[Tensor])
    """[L] of [1, N, P, D]"""
    values_L: list[Tensor] = field(default_factory=list[Tensor])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.keys_L.append(key)
        self.values_L.append(value)
        heads = query.shape[1]
        out = F.scaled_dot_product_attention(
            query, expand_heads(key, heads), expand_heads(value, heads), is_causal=True, scale=scaling
        )
        return out.transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Detached keys and values of an ancestor: leaves, at which a branch's backward stops and leaves an adjoint."""

    keys_L: tuple[Tensor, ...]
    """[L] of [1, N, P, D]"""
    values_L: tuple[Tensor, ...]

    @property
    def num_tokens(self) -> int:
        return self.keys_L[0].shape[2] if self.keys_L else 0

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """[2 L] keys and values in the order in which adjoints are kept."""
        return (*self.keys_L, *self.values_L)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A run of tokens in a pack that sees its prefix whole and itself causally."""

    start: int
    end: int
    prefix: Prefix | None


class PackPlan:
    """Several branches side by side in one sequence; none sees another."""

    def __init__(self, branches: Sequence[Branch]):
        self._branches = tuple(branches)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def _mask(self, num_tokens: int, num_prefix: int, device: torch.device) -> Tensor:
        key = (num_tokens, num_prefix)
        if key not in self._masks:
            # bottom-right causal: token t sees the prefix and tokens 0..t of its own branch
            full = torch.ones(num_tokens, num_prefix + num_tokens, dtype=torch.bool, device=device)
            self._masks[key] = full.tril(diagonal=num_prefix)
        return self._masks[key]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        heads = query.shape[1]
        outputs: list[Tensor] = []
        for branch in self._branches:
            span = slice(branch.start, branch.end)
            q, k, v = query[:, :, span], key[:, :, span], value[:, :, span]
            if branch.prefix is None or branch.prefix.num_tokens == 0:
                mask, causal = None, True
            else:
                k = torch.cat([branch.prefix.keys_L[layer], k], dim=2)
                v = torch.cat([branch.prefix.values_L[layer], v], dim=2)
                mask, causal = self._mask(branch.end - branch.start, branch.prefix.num_tokens, q.device), False
            outputs.append(
                F.scaled_dot_product_attention(
                    q, expand_heads(k, heads), expand_heads(v, heads), attn_mask=mask, is_causal=causal, scale=scaling
                )
            )
        return torch.cat(outputs, dim=2).transpose(1, 2)
