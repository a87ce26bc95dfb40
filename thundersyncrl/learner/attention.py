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

from torch import Tensor, nn
from transformers import AttentionInterface

from thundersyncrl.errors import PhaseError
from thundersyncrl.learner.tree_attention import Edge, tree_attention

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


@dataclass(slots=True, kw_only=True)
class PrefixPlan:
    """Plain causal attention over one sequence, keeping every layer's keys and values for its branches."""

    keys_L: list[Tensor] = field(default_factory=list[Tensor])
    """[L] of [1, N, P, D]"""
    values_L: list[Tensor] = field(default_factory=list[Tensor])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.keys_L.append(key)
        self.values_L.append(value)
        return tree_attention(query, key, value, [(0, query.shape[2])], (), (), scaling)


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
    """A run of tokens in a pack that sees its prefix and its past whole and itself causally."""

    start: int
    end: int
    prefix: Prefix | None
    past: tuple[Prefix, ...] = ()
    """Earlier runs of the same trajectory, with their graph."""


class PackPlan:
    """Several branches side by side in one sequence; none sees another. Neighbours under one prefix see it at once.

    Args:
        branches: in the order of the sequence, which they cover.
        keep: collect every layer's keys and values, for runs that come later.
    """

    def __init__(self, branches: Sequence[Branch], *, keep: bool = False):
        self._own = tuple((b.start, b.end) for b in branches)
        self._places: list[Prefix] = []
        self._edges: list[Edge] = []
        for branch in branches:
            for place in (branch.prefix, *branch.past):
                if place is not None and place.num_tokens:
                    self._see(branch, place)
        self._keep = keep
        self.keys_L: list[Tensor] = []
        self.values_L: list[Tensor] = []

    def _see(self, branch: Branch, place: Prefix) -> None:
        last = self._edges[-1] if self._edges else None
        if last is not None and self._places[last.place] is place and last.end == branch.start:
            self._edges[-1] = Edge(start=last.start, end=branch.end, place=last.place)
            return
        self._edges.append(Edge(start=branch.start, end=branch.end, place=len(self._places)))
        self._places.append(place)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if self._keep:
            self.keys_L.append(key)
            self.values_L.append(value)
        places = [(place.keys_L[layer], place.values_L[layer]) for place in self._places]
        return tree_attention(query, key, value, self._own, self._edges, places, scaling)
