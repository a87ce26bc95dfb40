from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thundersyncrl.learner import tree_attention as module
from thundersyncrl.learner.tree_attention import Edge, tree_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8
OWN = ((0, 3), (3, 4), (4, 9))
# the first place is seen by two spans at once, the second by the last span alone, the third by the first span alone
EDGES = (Edge(start=0, end=4, place=0), Edge(start=4, end=9, place=1), Edge(start=0, end=3, place=2))
SIZES = (6, 1, 4)
SCALING = 0.3


def leaves(dtype: torch.dtype, scale: float = 1.0) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return query, key and value, and the places."""
    draw = torch.Generator().manual_seed(0)

    def random(heads: int, tokens: int) -> Tensor:
        values = torch.randn(1, heads, tokens, WIDTH, generator=draw, dtype=torch.float64) * scale
        return values.to(dtype).requires_grad_(True)

    total = OWN[-1][1]
    states = [random(HEADS, total), random(KV_HEADS, total), random(KV_HEADS, total)]
    return states, [(random(KV_HEADS, n), random(KV_HEADS, n)) for n in SIZES]


def dense(states: list[Tensor], places: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return [1, T, H, D] from one dense matrix, with what a token may see written into a mask."""
    query, key, value = (t.double() for t in states)
    keys = torch.cat([*(k.double() for k, _ in places), key], dim=2)
    values = torch.cat([*(v.double() for _, v in places), value], dim=2)
    starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    visible = torch.zeros(query.shape[2], keys.shape[2], dtype=torch.bool)
    for edge in EDGES:
        visible[edge.start : edge.end, starts[edge.place] : starts[edge.place] + SIZES[edge.place]] = True
    for start, end in OWN:
        for token in range(start, end):
            visible[token, sum(SIZES) + start : sum(SIZES) + token + 1] = True
    repeats = HEADS // KV_HEADS
    logits = query @ keys.repeat_interleave(repeats, 1).transpose(2, 3) * SCALING
    weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ values.repeat_interleave(repeats, 1)).transpose(1, 2)


@pytest.mark.parametrize("path", ["one operation", "side by side"])
@pytest.mark.parametrize(
    ("dtype", "scale", "bound"), [(torch.float64, 1.0, 1e-12), (torch.float64, 8.0, 1e-11), (torch.float32, 1.0, 2e-6)]
)
def test_values_and_every_gradient_are_those_of_dense_attention(
    path: str, dtype: torch.dtype, scale: float, bound: float
) -> None:
    """Also with logits in the hundreds, where places hold very different shares of the softmax."""
    states, places = leaves(dtype, scale)
    inputs = [*states, *(t for place in places for t in place)]
    attend = tree_attention if path == "one operation" else module._side_by_side  # pyright: ignore[reportPrivateUsage]
    out = attend(*states, OWN, EDGES, places, SCALING)
    expected = dense(states, places)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad((out.double() * direction).sum(), inputs)
    exact = torch.autograd.grad((expected * direction).sum(), inputs)
    assert float((out.double() - expected).norm() / expected.norm()) < bound
    size = torch.stack([e.double().norm() for e in exact]).norm()
    for gradient, right in zip(got, exact, strict=True):
        assert float((gradient.double() - right.double()).norm() / size) < bound


def test_a_place_that_several_edges_name_gets_the_sum() -> None:
    states, places = leaves(torch.float64)
    shared = places[0]
    edges = (Edge(start=0, end=3, place=0), Edge(start=4, end=9, place=0))
    copies = [shared, tuple(t.detach().clone().requires_grad_(True) for t in shared)]
    apart = (edges[0], Edge(start=4, end=9, place=1))
    together = tree_attention(*states, OWN, edges, [shared], SCALING)
    separate = tree_attention(*states, OWN, apart, copies, SCALING)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(together, separate, rtol=0, atol=0)
    once = torch.autograd.grad(together.square().sum(), shared)
    first = torch.autograd.grad(separate.square().sum(), [*copies[0], *copies[1]])
    for index in range(2):
        torch.testing.assert_close(once[index], first[index] + first[index + 2], rtol=1e-12, atol=1e-14)
