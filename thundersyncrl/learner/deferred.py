"""Weight gradients of a forward that ran in pieces, taken in one product when its backward is over.

Backward of a linear layer is two products: one goes on through the graph, the other ends in the weight. Run piece by
piece, the second writes a gradient as large as the weight for every piece and adds them up. Here each piece leaves its
inputs X and its output gradients Y instead, and the weight's gradient is one product, sum over pieces of Y^T X.

Shapes: T tokens of a piece, K inputs, N outputs, V vocabulary, D width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

Product = Callable[[list[Tensor], list[Tensor]], Tensor]
"""From the inputs and the output gradients of all pieces to the weight's gradient."""


class DeferredWeights:
    """What the pieces of one backward left for each weight.

    Example:
        >>> weights, weight = DeferredWeights(), torch.nn.Parameter(torch.zeros(2, 3))
        >>> for _ in range(2):
        ...     weights.leave(weight, torch.ones(4, 3), torch.ones(4, 2), linear_product)
        >>> weights.added_to([None], [weight])
        [tensor([[8., 8., 8.],
                [8., 8., 8.]])]
    """

    def __init__(self) -> None:
        self._left: dict[int, tuple[Product, list[Tensor], list[Tensor]]] = {}

    @contextlib.contextmanager
    def collecting(self) -> Generator[None, None, None]:
        """Let layers that run inside leave their weights' part here when their backward comes."""
        token = _COLLECTOR.set(self)
        try:
            yield
        finally:
            _COLLECTOR.reset(token)

    def leave(self, weight: Tensor, inputs: Tensor, gradient: Tensor, product: Product) -> None:
        """Keep one piece's inputs and output gradients until `added_to`.

        Args:
            weight: whose gradient they make.
            inputs: [T, K], or token ids [T].
            gradient: [T, N]
            product: that makes it.
        """
        _, all_inputs, gradients = self._left.setdefault(id(weight), (product, [], []))
        all_inputs.append(inputs)
        gradients.append(gradient)

    @torch.no_grad()  # the inputs are parts of a graph, the products are numbers
    def added_to(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return gradients of parameters with what was left for them added; nothing is left then."""
        left, self._left = self._left, {}
        out = list(gradients)
        for index, parameter in enumerate(parameters):
            if id(parameter) in left:
                product, inputs, pieces = left[id(parameter)]
                late, known = product(inputs, pieces), out[index]
                out[index] = late if known is None else late.add_(known)
        return out


_COLLECTOR: ContextVar[DeferredWeights | None] = ContextVar("deferred weights", default=None)


def collector() -> DeferredWeights | None:
    """Return where layers that run now leave their weights' part; None where they keep it in the graph."""
    return _COLLECTOR.get()


def linear_product(inputs: list[Tensor], gradients: list[Tensor]) -> Tensor:
    """Return sum Y^T X [N, K] of inputs [T, K] and output gradients [T, N]."""
    return torch.cat(gradients).T @ torch.cat(inputs)


def bias_product(_: list[Tensor], gradients: list[Tensor]) -> Tensor:
    """Return the sum [N] of output gradients [T, N]."""
    return torch.cat(gradients).sum(0)


def embedding_product(num_tokens: int, padding_id: int) -> Product:
    """Return the product of an embedding [V, D] from token ids [T] and output gradients [T, D].

    Args:
        num_tokens: V.
        padding_id: the row without gradient, -1 for none.
    """

    def product(ids: list[Tensor], gradients: list[Tensor]) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(
            torch.cat(gradients), torch.cat(ids), num_tokens, padding_id, False
        )

    return product
