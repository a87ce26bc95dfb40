"""Checks that advantages have the form that its estimator declared."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from thundersyncrl.algorithms.estimator import CoefficientClass
from thundersyncrl.errors import CoefficientClassError, ContractError, NumericsError

RELATIVE_TOLERANCE = 1e-9
"""Largest misfit over the advantages' range: far above float64 rounding, far below that of a wrong form."""
_ROUNDING = 64 * sys.float_info.epsilon


def affine_coefficients(rewards: Sequence[float], advantages: Sequence[float]) -> tuple[float, int]:
    """Return (alpha, anchor) such that A_i = A_anchor + alpha * (r_i - r_anchor), with anchor 0.

    alpha is the slope between the smallest and the largest reward. Written from the anchor, the offset of the
    rewards never enters, so rewards near 10,000 keep the accuracy of their differences.

    Args:
        rewards: [N] rewards.
        advantages: [N] advantages in the same order.

    Returns:
        Slope (advantage per reward; 0.0 for equal rewards) and the anchor's index, which is always 0.

    Raises:
        ContractError: the two differ in number.
        NumericsError: a number isn't finite.

    Example:
        >>> affine_coefficients([1.0, 0.0, 3.0], [5.0, 3.0, 9.0])
        (2.0, 0)
    """
    _require_numbers(rewards, advantages, where="affine coefficients")
    if not rewards:
        return 0.0, 0
    low = min(range(len(rewards)), key=rewards.__getitem__)
    high = max(range(len(rewards)), key=rewards.__getitem__)
    if rewards[low] == rewards[high]:
        return 0.0, 0
    return (advantages[high] - advantages[low]) / (rewards[high] - rewards[low]), 0


def check_class(
    coefficient: CoefficientClass, rewards: Sequence[float], advantages: Sequence[float], where: str
) -> None:
    """Raise unless the advantages can be written in the declared class, on the rewards that came.

    The affine classes need A_i = A_0 + alpha (r_i - r_0), `by_value` equal advantages for equal rewards.
    `known` and `arbitrary` allow any advantages here; `check_known` compares what `known` promises.

    Args:
        coefficient: The declared class.
        rewards: [N] rewards of the group, or of the step for `affine_batch`.
        advantages: [N] advantages in the same order.
        where: What is being closed, for the message.

    Raises:
        CoefficientClassError: the declared class can't express them; the message has the numbers.
        ContractError: rewards and advantages differ in number.
        NumericsError: a number isn't finite.

    Example:
        >>> check_class(CoefficientClass.AFFINE_GROUP, [1.0, 0.0, 0.5], [0.5, -0.5, 0.0], "step=0/group=0")
    """
    _require_numbers(rewards, advantages, where)
    if coefficient in (CoefficientClass.AFFINE_GROUP, CoefficientClass.AFFINE_BATCH):
        _check_affine(coefficient, rewards, advantages, where)
    elif coefficient is CoefficientClass.BY_VALUE:
        _check_by_value(rewards, advantages, where)


def check_known(used: Sequence[float], recomputed: Sequence[float], where: str) -> None:
    """Raise unless a `known` estimator gives each trajectory the advantage that it gave when only its reward
    was in.

    Args:
        used: [N] advantages computed from each reward alone.
        recomputed: [N] advantages computed from all rewards together.
        where: What is being closed, for the message.

    Raises:
        CoefficientClassError: an advantage changed once the other rewards were in.
        ContractError: the two differ in number.
        NumericsError: a number isn't finite.

    Example:
        >>> check_known([0.5, -0.5], [0.5, -0.5], "step=0/group=0")
    """
    _require_numbers(used, recomputed, where)
    for index, (alone, together) in enumerate(zip(used, recomputed, strict=True)):
        if not math.isclose(alone, together, rel_tol=RELATIVE_TOLERANCE, abs_tol=0.0):
            raise CoefficientClassError(
                f"expected an advantage of its own reward only (class `known`), got {alone!r} from it "
                f"alone and {together!r} with the others (index {index}, {where}); declare `affine_group`, "
                "`by_value` or `arbitrary`"
            )


def _check_affine(
    coefficient: CoefficientClass, rewards: Sequence[float], advantages: Sequence[float], where: str
) -> None:
    alpha, anchor = affine_coefficients(rewards, advantages)
    tolerance = _tolerance(rewards, advantages)
    for index, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        fitted = advantages[anchor] + alpha * (reward - rewards[anchor])
        if not abs(advantage - fitted) <= tolerance:  # a nan misfits too
            raise CoefficientClassError(
                f"expected advantages alpha * r + beta (class `{coefficient.value}`), got {advantage!r} for "
                f"reward {reward!r} where the line through the others gives {fitted!r} (index {index} of "
                f"{len(rewards)}, {where}); declare `by_value` or `arbitrary`, or compute them in float64"
            )


def _check_by_value(rewards: Sequence[float], advantages: Sequence[float], where: str) -> None:
    tolerance = _tolerance(rewards, advantages)
    first_of: dict[float, float] = {}
    for index, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        first = first_of.setdefault(reward, advantage)
        if abs(advantage - first) > tolerance:
            raise CoefficientClassError(
                f"expected equal advantages for equal rewards (class `by_value`), got {first!r} and "
                f"{advantage!r} for reward {reward!r} (index {index}, {where}); declare `arbitrary`"
            )


def _tolerance(rewards: Sequence[float], advantages: Sequence[float]) -> float:
    """Return the largest misfit that rounding explains, in the unit of the advantages.

    A reward of size m is only known to m * epsilon, which is a share m * epsilon / range of what advantages
    see. Below the smallest normal float the rounding error is absolute, whatever the advantages' size.
    """
    if not rewards:
        return 0.0
    spread = max(advantages) - min(advantages)
    tolerance = RELATIVE_TOLERANCE * spread + _ROUNDING * max(abs(a) for a in advantages) + sys.float_info.min
    reward_range = max(rewards) - min(rewards)
    if reward_range > 0.0:
        tolerance += _ROUNDING * max(abs(r) for r in rewards) / reward_range * spread
    return tolerance


def _require_numbers(rewards: Sequence[float], advantages: Sequence[float], where: str) -> None:
    if len(rewards) != len(advantages):
        raise ContractError(
            f"expected one advantage per reward, got {len(advantages)} for {len(rewards)} rewards ({where}); "
            "an estimator returns the nesting that it was given"
        )
    for index, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        if not (math.isfinite(reward) and math.isfinite(advantage)):
            raise NumericsError(
                f"expected finite numbers, got reward {reward!r} and advantage {advantage!r} (index {index}, "
                f"{where}); look at the verifier's reward and at divisions in the estimator"
            )
