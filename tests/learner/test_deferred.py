"""Weight gradients that wait: the same numbers as autograd's, from any number of pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thundersyncrl.learner.deferred import DeferredWeights
from thundersyncrl.learner.linear import embedding, linear, use_own_layers


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    biased=st.booleans(),
    wide=st.booleans(),
    padding_id=st.sampled_from([None, 3]),
    seed=st.integers(0, 2**16),
)
def test_pieces_give_the_gradient_of_the_whole(
    sizes: list[int], biased: bool, wide: bool, padding_id: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_inputs = 600 if wide else 6
    embed = nn.Embedding(11, num_inputs, padding_idx=padding_id, dtype=torch.float64)
    layer = nn.Linear(num_inputs, 4, bias=biased, dtype=torch.float64)
    parameters = [embed.weight, *layer.parameters()]
    ids = torch.randint(11, (sum(sizes),), generator=generator)
    up = torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(layer(embed(ids)), parameters, up)

    deferred = DeferredWeights()
    with deferred.collecting():
        pieces = [linear(embedding(embed, part), layer.weight, layer.bias) for part in ids.split(sizes)]
    objective = torch.stack([(p * u).sum() for p, u in zip(pieces, up.split(sizes), strict=True)]).sum()
    from_graph = torch.autograd.grad(objective, parameters, allow_unused=True)
    assert all(g is None for g in from_graph)
    for mine, theirs in zip(deferred.added_to(from_graph, parameters), wanted, strict=True):
        assert mine is not None
        assert not mine.requires_grad
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert deferred.added_to([None], [embed.weight]) == [None]  # nothing is counted twice


def test_what_the_graph_gave_is_added() -> None:
    layer = nn.Linear(3, 2, dtype=torch.float64)
    hidden = torch.randn(4, 3, dtype=torch.float64)
    deferred = DeferredWeights()
    with deferred.collecting():
        early = linear(hidden, layer.weight, layer.bias)
    objective = early.sum() + linear(hidden, layer.weight, layer.bias).sum()
    parameters = list(layer.parameters())
    found = deferred.added_to(torch.autograd.grad(objective, parameters), parameters)
    wanted = torch.autograd.grad(2 * layer(hidden).sum(), parameters)
    torch.testing.assert_close(found, list(wanted), rtol=1e-12, atol=1e-12)


def test_nothing_waits_without_gradient_or_outside() -> None:
    layer, hidden = nn.Linear(3, 2), torch.randn(4, 3)
    deferred = DeferredWeights()
    with deferred.collecting(), torch.no_grad():
        assert not linear(hidden, layer.weight).requires_grad
    layer.weight.requires_grad_(False)
    with deferred.collecting():
        out = linear(hidden.requires_grad_(), layer.weight, layer.bias)
    (to_hidden, to_bias) = torch.autograd.grad(out.sum(), [hidden, layer.bias])
    assert to_hidden is not None
    assert to_bias is not None
    assert deferred.added_to([None], [layer.weight]) == [None]


def test_layers_of_other_behavior_keep_their_own_gradient() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0))
    use_own_layers(model)
    deferred = DeferredWeights()
    with deferred.collecting():
        out = model(torch.tensor([1, 2]))
    (gradient,) = torch.autograd.grad(out.sum(), list(model.parameters()))
    assert float(gradient.sum()) == pytest.approx(6.0)
