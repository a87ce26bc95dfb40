"""Test-only faults: each breaks one thing that makes the update exact, to show that the certificate notices.

They patch the learner for the duration of one certificate, and nothing else can switch them on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from thundersyncrl.errors import ConfigError
from thundersyncrl.learner import ledger
from thundersyncrl.learner.attention import AttentionPlan, PackPlan
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.ledger import Coefficients
from thundersyncrl.learner.policy import Policy
from thundersyncrl.learner.prompt import Prompt
from thundersyncrl.learner.queue import GroupWork
from thundersyncrl.learner.scoring import Scores
from thundersyncrl.records import TrajectoryId

_Patch = Callable[[], AbstractContextManager[Any]]


def _cut_adjoint() -> AbstractContextManager[Any]:
    """Nothing comes back through the prompt: a plain detached cache."""

    def walk(prompt: Prompt, adjoints: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(p) for p in parameters]

    return patch.object(Prompt, "walk", walk)


@contextmanager
def _naive_offset() -> Generator[None, None, None]:
    """Fold r * H instead of (r - r_first) * H: the same in exact arithmetic, useless where rewards have an offset."""
    pair = cast(Any, ledger)._Pair
    folded = pair.fold

    def fold(self: Any, member: TrajectoryId, reward: float, source: list[Tensor]) -> None:
        is_first = self.first is None
        if is_first:
            self.weighted = cast(list[Tensor], torch._foreach_mul(source, reward)) if source else []  # pyright: ignore
            folded(self, member, reward, source)
            self.first_reward = 0.0
        else:
            folded(self, member, reward, source)

    def combine(self: Any, coefficients: Coefficients) -> list[Tensor]:
        if self.first is None:
            return []
        intercept = coefficients.advantages[self.first] - coefficients.alpha * coefficients.rewards[self.first]
        total: list[Tensor] = [t * intercept for t in self.plain]
        for part, weighted in zip(total, self.weighted, strict=True):
            part.add_(weighted, alpha=coefficients.alpha)
        return total

    naive = type("_NaivePair", (pair,), {"fold": fold, "combine": combine})
    with patch.object(ledger, "_Pair", naive):
        yield


def _times(factor: float) -> AbstractContextManager[Any]:
    weighted = cast(Any, Learner)._weighted

    def scaled(learner: Learner, scores: Scores) -> Tensor:
        id = scores.branch.id
        return weighted(learner, scores) * (factor if (id.group, id.member) == (0, 1) else 1.0)

    return patch.object(Learner, "_weighted", scaled)


def _drop_trajectory() -> AbstractContextManager[Any]:
    """One trajectory is counted but its gradient is lost."""
    return _times(0.0)


def _double_count() -> AbstractContextManager[Any]:
    """One trajectory's gradient enters twice."""
    return _times(2.0)


def _stale_coefficient() -> AbstractContextManager[Any]:
    """The baseline of a group is that of a moment before: it misses the last member's reward."""
    current = cast(Any, Learner)._set_advantages

    def stale(learner: Learner, groups: Sequence[GroupWork]) -> None:
        current(learner, groups)
        for work in groups:
            values = work.advantages
            shift = values[max(values)] / max(len(values) - 1, 1) if values else 0.0
            work.advantages = {member: advantage + shift for member, advantage in values.items()}

    return patch.object(Learner, "_set_advantages", stale)


def _shifted_positions() -> AbstractContextManager[Any]:
    """What follows a prompt is run one position too late."""
    hidden = Policy.hidden

    def shifted(policy: Policy, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        return hidden(policy, token_ids, positions + int(isinstance(plan, PackPlan)), plan)

    return patch.object(Policy, "hidden", shifted)


def _low_precision_accumulation() -> AbstractContextManager[Any]:
    """Gradients are summed in bfloat16."""

    def low(tensor: Tensor) -> torch.dtype:
        return torch.bfloat16

    return patch.object(ledger, "accumulation_dtype", low)


_PATCHES: Mapping[str, _Patch] = {
    "cut_adjoint": _cut_adjoint,
    "double_count": _double_count,
    "drop_trajectory": _drop_trajectory,
    "low_precision_accumulation": _low_precision_accumulation,
    "naive_offset": _naive_offset,
    "shifted_positions": _shifted_positions,
    "stale_coefficient": _stale_coefficient,
}
SABOTAGES = tuple(_PATCHES)


def check_sabotage(name: str) -> None:
    """Raise unless the name is empty or a known fault.

    Raises:
        ConfigError: no such fault; the message lists them.
    """
    if name and name not in _PATCHES:
        raise ConfigError(f"expected --sabotage to be one of {', '.join(SABOTAGES)}, got {name!r}")


def sabotaged(name: str) -> AbstractContextManager[Any]:
    """Break one thing while the body runs; an empty name breaks nothing."""
    return _PATCHES[name]() if name else nullcontext()
