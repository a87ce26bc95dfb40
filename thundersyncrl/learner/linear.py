"""Linear layers and embeddings as engine and learner run them: exact sums, and weight gradients that can wait.

A CPU's matrix product adds up one long float32 sum per output, whose rounding error grows with the square root of its
length. Adding blocks of 128 terms takes a third of that error away (relative to the output, at 576 terms: 3.0e-7 to
2.0e-7) for 4 to 14 % of a layer's forward, a quarter at a wide head; see docs/decisions/sums-in-blocks.md.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thundersyncrl.learner.deferred import (
    DeferredWeights,
    bias_product,
    collector,
    embedding_product,
    linear_product,
)

BLOCK = 128
"""Terms of a sum that are added in one go."""


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return hidden @ weight.T + bias, with its sums in blocks where that gains anything.

    Elsewhere they are torch's own: short sums and float64 have nothing to gain, under autocast other errors are far
    larger, and a GPU's kernels add in blocks anyhow.

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
    is_low = torch.is_autocast_enabled(hidden.device.type)
    deferred = collector() if weight.requires_grad and torch.is_grad_enabled() and not is_low else None
    if deferred is None and not _adds_in_blocks(hidden, weight):
        return F.linear(hidden, weight, bias)
    return cast(Tensor, _Linear.apply(hidden, weight, bias, deferred))


def _adds_in_blocks(hidden: Tensor, weight: Tensor) -> bool:
    is_single = hidden.dtype is weight.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    return weight.shape[1] >= 4 * BLOCK and is_single and hidden.device.type == "cpu"


def embedding(layer: nn.Embedding, token_ids: Tensor) -> Tensor:
    """Return the rows of an embedding [V, D] for token ids [...]."""
    is_plain = layer.max_norm is None and not layer.sparse and not layer.scale_grad_by_freq
    deferred = collector() if is_plain and layer.weight.requires_grad and torch.is_grad_enabled() else None
    if deferred is None:
        return nn.Embedding.forward(layer, token_ids)
    return cast(Tensor, _Embedding.apply(token_ids, layer.weight, layer.padding_idx, deferred))


def use_own_layers(model: nn.Module) -> None:
    """Let the model's linear layers and embeddings run `linear` and `embedding`; call it before adapters wrap them."""

    def forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
        return linear(hidden, layer.weight, layer.bias)

    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = forward.__get__(module)
        elif type(module) is nn.Embedding:
            module.forward = embedding.__get__(module)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredWeights | None
    ) -> Tensor:
        ctx.save_for_backward(hidden if weight.requires_grad else None, weight, bias)
        ctx.deferred = deferred
        if not _adds_in_blocks(hidden, weight):
            return F.linear(hidden, weight, bias)
        rows = hidden.reshape(-1, hidden.shape[-1])
        out = rows[:, :BLOCK] @ weight[:, :BLOCK].T
        for start in range(BLOCK, weight.shape[1], BLOCK):
            out.addmm_(rows[:, start : start + BLOCK], weight[:, start : start + BLOCK].T)
        if bias is not None:
            out += bias
        return out.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        to_hidden = (grad @ weight).view(*grads[0].shape[:-1], -1) if needs_hidden else None
        rows = grad if hidden is None else hidden.reshape(-1, weight.shape[1])
        keep = partial(_late_or_now, ctx.deferred, rows, grad)
        to_weight = keep(weight, linear_product) if needs_weight else None
        return to_hidden, to_weight, keep(bias, bias_product) if needs_bias else None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, token_ids: Tensor, weight: Tensor, padding_id: int | None, deferred: DeferredWeights
    ) -> Tensor:
        ctx.save_for_backward(token_ids, weight)
        ctx.padding_id, ctx.deferred = -1 if padding_id is None else padding_id, deferred
        return F.embedding(token_ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        token_ids, weight = ctx.saved_tensors
        product = embedding_product(weight.shape[0], ctx.padding_id)
        ctx.deferred.leave(weight, token_ids.flatten(), grads[0].reshape(-1, weight.shape[1]), product)
        return None, None, None, None


def _late_or_now(
    deferred: DeferredWeights | None, inputs: Tensor, gradient: Tensor, parameter: Tensor, product: Any
) -> Tensor | None:
    if deferred is None:
        return product([inputs], [gradient])
    deferred.leave(parameter, inputs, gradient, product)
    return None
