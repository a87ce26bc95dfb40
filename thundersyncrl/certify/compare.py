"""Relative errors between two gradients, in all and by parameter kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

WHOLE = "all"
"""Key of the error of the whole gradient."""


def parameter_kind(name: str) -> str:
    """Return the kind of a parameter by its Hugging Face name.

    Example:
        >>> parameter_kind("model.layers.0.self_attn.q_proj.weight"), parameter_kind("model.embed_tokens.weight")
        ('attention', 'embeddings')
        >>> parameter_kind("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight")
        'lora_A'
    """
    # in this order: an adapter sits on an attention matrix, and a norm may sit inside attention
    kinds = {
        "lora_A": "lora_A",
        "lora_B": "lora_B",
        "norm": "norms",
        "attn": "attention",
        "mlp": "mlp",
        "embed": "embeddings",
        "head": "head",
    }
    return next((kind for part, kind in kinds.items() if part in name), "other")


def relative_errors(gradient: Sequence[Tensor], reference: Sequence[Tensor], kinds: Sequence[str]) -> dict[str, float]:
    """Return |gradient - reference| / |reference|, L2 in float64, by parameter kind and in all.

    Args:
        gradient: by parameter.
        reference: by parameter, same shapes.
        kinds: of each parameter.

    Returns:
        Errors without unit; 0 where both are zero, inf where only the reference is, nan never (inf instead).

    Example:
        >>> relative_errors([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 0.0])], ["mlp"])
        {'mlp': 2.0, 'all': 2.0}
    """
    squares: dict[str, list[float]] = {kind: [0.0, 0.0] for kind in (*kinds, WHOLE)}
    for component, exact, kind in zip(gradient, reference, kinds, strict=True):
        exact = exact.double()
        misfit = float(torch.linalg.vector_norm(component.to(exact) - exact)) ** 2
        size = float(torch.linalg.vector_norm(exact)) ** 2
        for key in (kind, WHOLE):
            squares[key][0] += misfit
            squares[key][1] += size
    return {kind: _ratio(misfit, size) for kind, (misfit, size) in squares.items()}


def _ratio(misfit: float, size: float) -> float:
    if misfit == 0.0:
        return 0.0
    return math.sqrt(misfit / size) if size > 0.0 and math.isfinite(misfit) else math.inf


def broken(kinds: Sequence[str]) -> Mapping[str, float]:
    """Return the errors of a gradient that never came about: inf everywhere."""
    return dict.fromkeys((*kinds, WHOLE), math.inf)
