"""Attention over a tree of spans, as one operation: what a query sees in several places is merged by log-sum-exp.

A query's softmax over the keys of its prompt, of its own past and of itself splits into one softmax per place:

    out = sum_j exp(l_j - l) out_j,    l = log sum_j exp(l_j)

so no key is copied next to another, no mask is built, and nothing outside the causal triangle is computed. Backward,
every place gets its share from the merged output and log-sum-exp alone (as in ring attention). On the CPU each place
runs in torch's flash kernel; elsewhere the keys are laid side by side under a mask.

Shapes: H query heads, N key/value heads, T tokens of the pack, S keys of one place, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Queries `start:end` of a pack see all keys of one place."""

    start: int
    end: int
    place: int
    """Index into the keys and values that are given from outside."""


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Sequence[tuple[int, int]],
    edges: Sequence[Edge],
    places: Sequence[tuple[Tensor, Tensor]],
    scaling: float,
) -> Tensor:
    """Return [1, T, H, D]: every span sees itself causally, and the places that its edges name whole.

    Args:
        query: [1, H, T, D]
        key: [1, N, T, D]
        value: [1, N, T, D]
        own: spans (start, end) that cover the pack without overlap, in order.
        edges: what else is seen; an edge may reach over several spans.
        places: keys and values [1, N, S, D], S >= 1.
        scaling: factor on the logits.
    """
    if query.device.type != "cpu":
        return _side_by_side(query, key, value, own, edges, places, scaling)
    if torch.is_autocast_enabled("cpu"):  # what torch's own attention does under autocast, the bare kernel doesn't
        low = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(low), key.to(low), value.to(low)
        places = [(k.to(low), v.to(low)) for k, v in places]
    if not edges and len(own) == 1:
        return cast(Tensor, _flash(query, key, value, 0.0, True, scale=scaling)[0]).transpose(1, 2)
    flat = [t for place in places for t in place]
    return cast(Tensor, _TreeAttention.apply(query, key, value, tuple(own), tuple(edges), scaling, *flat))


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: tuple[tuple[int, int], ...],
        edges: tuple[Edge, ...],
        scaling: float,
        *places: Tensor,
    ) -> Tensor:
        spans = [_flash(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], 0.0, True, scale=scaling) for a, b in own]
        # [1, T, H, D] and [1, T, H] in memory, as the kernel lays them out
        out = torch.cat([o.transpose(1, 2) for o, _ in spans], dim=1)
        lse = torch.cat([s.transpose(1, 2) for _, s in spans], dim=1)
        for edge in edges:
            seen, total = _flash(
                query[:, :, edge.start : edge.end],
                places[2 * edge.place],
                places[2 * edge.place + 1],
                0.0,
                False,
                scale=scaling,
            )
            _merge(out[:, edge.start : edge.end], lse[:, edge.start : edge.end], seen, total)
        ctx.save_for_backward(query, key, value, out, lse, *places)
        ctx.own, ctx.edges, ctx.scaling = own, edges, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *places = ctx.saved_tensors
        grad, out, lse = grads[0].transpose(1, 2), out.transpose(1, 2), lse.transpose(1, 2)

        def share(start: int, end: int, keys: Tensor, values: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            span = slice(start, end)
            return _flash_backward(
                grad[:, :, span],
                query[:, :, span],
                keys,
                values,
                out[:, :, span],
                lse[:, :, span],
                0.0,
                causal,
                scale=ctx.scaling,
            )

        shares = [share(a, b, key[:, :, a:b], value[:, :, a:b], True) for a, b in ctx.own]
        to_query, to_key, to_value = (torch.cat(parts, dim=2) for parts in zip(*shares, strict=True))
        to_places: list[Tensor | None] = [None] * len(places)
        for edge in ctx.edges:
            at = 2 * edge.place
            more, *to_place = share(edge.start, edge.end, places[at], places[at + 1], False)
            to_query[:, :, edge.start : edge.end] += more
            for index, part in enumerate(to_place, start=at):
                known = to_places[index]
                to_places[index] = part if known is None else known.add_(part)
        return (to_query, to_key, to_value, None, None, None, *to_places)


def _merge(out: Tensor, lse: Tensor, seen: Tensor, total: Tensor) -> None:
    """Merge what another place gave into out [1, t, H, D] and lse [1, t, H], in place."""
    seen, total = seen.transpose(1, 2), total.transpose(1, 2)
    both = torch.logaddexp(lse, total)
    out.mul_((lse - both).exp_().unsqueeze(-1).to(out.dtype))
    out.addcmul_(seen, (total - both).exp_().unsqueeze(-1).to(out.dtype))
    lse.copy_(both)


def _side_by_side(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Sequence[tuple[int, int]],
    edges: Sequence[Edge],
    places: Sequence[tuple[Tensor, Tensor]],
    scaling: float,
) -> Tensor:
    """Return the same from one call per span over keys laid side by side; for devices without the CPU's kernel."""
    sizes = [end - start for start, end in own]
    pieces = zip(own, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    outputs: list[Tensor] = []
    for (start, end), q, k, v in pieces:
        seen = [places[e.place] for e in edges if e.start <= start and end <= e.end]
        k = torch.cat([*(place[0] for place in seen), k], dim=2)
        v = torch.cat([*(place[1] for place in seen), v], dim=2)
        # bottom-right causal: token t sees every place and tokens 0..t of its own span
        full = torch.ones(end - start, k.shape[2], dtype=torch.bool, device=q.device)
        mask = full.tril(diagonal=k.shape[2] - (end - start)) if seen else None
        heads = q.shape[1]
        outputs.append(
            F.scaled_dot_product_attention(
                q, expand_heads(k, heads), expand_heads(v, heads), mask, is_causal=mask is None, scale=scaling
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def expand_heads(states: Tensor, num_heads: int) -> Tensor:
    """Return keys or values [B, N, S, D] repeated to [B, H, S, D], each for its block of query heads."""
    repeats = num_heads // states.shape[1]
    return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)
