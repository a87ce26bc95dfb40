"""Linear layers whose float32 sums run in blocks, so that engine and learner differ less.

A CPU's matrix product adds up one long sum per output, whose rounding error grows with the square root of its length.
Adding blocks of 128 terms takes a third of that error away (relative to the output, at 576 terms: 3.0e-7 to 2.0e-7)
for 4 to 14 % of a forward's time; see docs/decisions/sums-in-blocks.md.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

BLOCK = 128
"""Terms of a sum that are added in one go."""


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return hidden @ weight.T + bias, with its sums in blocks where that gains anything.

    Elsewhere it is torch's own: in float64 there is nothing to gain, under autocast other errors are far larger, and a
    GPU's kernels add in blocks anyhow.

    Args:
        hidden: [..., K]
        weight: [N, K]
        bias: [N]

    Returns:
        [..., N]

    Example:
        >>> torch.equal(linear(torch.ones(1, 512), torch.ones(3, 512)), torch.full((1, 3), 512.0))
        True
    """
    plain = (
        weight.shape[1] < 4 * BLOCK
        or weight.dtype is not torch.float32
        or hidden.dtype is not torch.float32
        or hidden.device.type != "cpu"
        or torch.is_autocast_enabled("cpu")
    )
    if plain:
        return nn.functional.linear(hidden, weight, bias)
    return cast(Tensor, _Blocked.apply(hidden, weight, bias))


def sum_linears_in_blocks(model: nn.Module) -> None:
    """Let the model's linear layers run `linear`; call it before adapters wrap them."""

    def forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
        return linear(hidden, layer.weight, layer.bias)

    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = forward.__get__(module)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(hidden if weight.requires_grad else None, weight)
        rows = hidden.reshape(-1, hidden.shape[-1])
        out = rows[:, :BLOCK] @ weight[:, :BLOCK].T
        for start in range(BLOCK, weight.shape[1], BLOCK):
            out.addmm_(rows[:, start : start + BLOCK], weight[:, start : start + BLOCK].T)
        if bias is not None:
            out += bias
        return out.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        needs = ctx.needs_input_grad
        to_hidden = (grad @ weight).view(*grads[0].shape[:-1], -1) if needs[0] else None
        to_weight = grad.T @ hidden.reshape(-1, weight.shape[1]) if needs[1] else None
        return to_hidden, to_weight, grad.sum(0) if needs[2] else None
