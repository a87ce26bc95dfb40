"""One optimizer step per step: check, clip once, AdamW, schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from thundersyncrl.config import LearnerConfig
from thundersyncrl.errors import NumericsError


def schedule_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """Return the factor on the learning rate at a step, counted from 0.

    Linear warm-up to 1, then constant, or falling to 0 at `total_steps` along a line or half a cosine.

    Example:
        >>> [schedule_factor(s, schedule="linear", warmup_steps=2, total_steps=6) for s in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant" or total_steps <= warmup_steps:
        return 1.0
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


class PolicyOptimizer:
    """AdamW over the trained parameters, fed with a settled gradient to ascend.

    Args:
        parameters: trained parameters by name.
        settings: learning rate, schedule, decay and clipping.
        total_steps: where the schedule ends.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: LearnerConfig, *, total_steps: int):
        self._parameters = dict(parameters)
        self._max_norm = settings.max_grad_norm
        self._adamw = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            foreach=True,
        )
        self._schedule = LambdaLR(
            self._adamw,
            lambda step: schedule_factor(
                step, schedule=settings.schedule, warmup_steps=settings.warmup_steps, total_steps=total_steps
            ),
        )

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        return float(self._adamw.param_groups[0]["lr"])

    def ascend(self, gradient: Sequence[Tensor]) -> float:
        """Step along the gradient and return its norm before clipping. An empty gradient leaves everything as it is.

        A step without any signal moves nothing: neither weights (no decay) nor moments; only the schedule goes on.

        Raises:
            NumericsError: the gradient isn't finite; nothing was changed.
        """
        norm = 0.0
        if gradient:
            norm = self._checked_norm(gradient)
            factor = min(1.0, self._max_norm / (norm + 1e-12))
            for parameter, component in zip(self._parameters.values(), gradient, strict=True):
                parameter.grad = component.to(parameter.dtype).mul_(-factor)
            self._adamw.step()
            self._adamw.zero_grad(set_to_none=True)
        else:
            self._adamw._opt_called = True  # pyright: ignore  # the schedule would warn that no step came before it
        self._schedule.step()
        return norm

    def _checked_norm(self, gradient: Sequence[Tensor]) -> float:
        norms = torch._foreach_norm(list(gradient))  # pyright: ignore
        norm = float(torch.linalg.vector_norm(torch.stack([n.double() for n in norms])))
        if not math.isfinite(norm):
            bad = [n for n, v in zip(self._parameters, norms, strict=True) if not bool(torch.isfinite(v))]
            raise NumericsError(
                f"expected a finite gradient, got a norm of {norm} ({len(bad)} parameters, first {bad[:1]}); "
                "the weights were not changed"
            )
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self._adamw.state_dict(), "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._adamw.load_state_dict(state["adamw"])
        self._schedule.load_state_dict(state["schedule"])
