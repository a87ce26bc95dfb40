"""Sums in blocks: the same linear layer, with less rounding error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from thundersyncrl.learner.linear import BLOCK, linear, use_own_layers


def rounding_error(out: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> float:
    exact = hidden.double() @ weight.double().T
    return float((out.double() - exact).pow(2).mean().sqrt() / exact.std())


@pytest.mark.parametrize("num_inputs", [576, 1536])
@pytest.mark.parametrize("num_rows", [1, 64, 500])
def test_blocks_never_round_more_than_one_long_sum(num_inputs: int, num_rows: int):
    generator = torch.Generator().manual_seed(num_inputs + num_rows)
    hidden = torch.randn(num_rows, num_inputs, generator=generator)
    weight = torch.randn(256, num_inputs, generator=generator)
    blocks = rounding_error(linear(hidden, weight), hidden, weight)
    assert blocks <= 1.05 * rounding_error(F.linear(hidden, weight), hidden, weight)
    assert blocks <= 3e-7


@given(
    num_inputs=st.integers(4 * BLOCK, 6 * BLOCK + 1),
    rows=st.lists(st.integers(1, 4), max_size=3),
    biased=st.booleans(),
    trained=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_output_and_gradients_are_those_of_a_linear_layer(
    num_inputs: int, rows: list[int], biased: bool, trained: bool, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, num_inputs, generator=generator).requires_grad_()
    weight = torch.randn(7, num_inputs, generator=generator).requires_grad_(trained)
    bias = torch.randn(7, generator=generator).requires_grad_(trained) if biased else None
    given_tensors = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    out = linear(hidden, weight, bias)
    up = torch.randn(out.shape, generator=generator)
    got = torch.autograd.grad(out, given_tensors, up)

    exact_inputs = [None if t is None else t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    assert exact_inputs[0] is not None
    assert exact_inputs[1] is not None
    exact = F.linear(exact_inputs[0], exact_inputs[1], exact_inputs[2])
    assert out.shape == exact.shape
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6 * num_inputs**0.5)
    kept = [e for t, e in zip((hidden, weight, bias), exact_inputs, strict=True) if t is not None and t.requires_grad]
    wanted = torch.autograd.grad(exact, [e for e in kept if e is not None], up.double())
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=2e-5)


def test_elsewhere_it_is_torchs_own():
    short, wide = torch.randn(3, 4 * BLOCK - 1), torch.randn(3, 4 * BLOCK)
    assert torch.equal(linear(short, short), F.linear(short, short))
    assert torch.equal(linear(wide.double(), wide.double()), F.linear(wide.double(), wide.double()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(wide, wide).dtype is torch.bfloat16


def test_only_plain_layers_are_changed():
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    model = nn.Sequential(nn.Linear(512, 4), Own(4, 4), nn.ReLU())
    hidden = torch.randn(2, 512)
    plain = model[0](hidden)
    use_own_layers(model)
    torch.testing.assert_close(model[0](hidden), plain)
    assert torch.equal(model[1](plain), plain)
