"""What an advantage estimator is, with the class of its coefficient, and the registry of names."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thundersyncrl.errors import ConfigError


class CoefficientClass(enum.StrEnum):
    """How much of the other rewards a trajectory's coefficient needs; it decides what the ledger keeps."""

    KNOWN = "known"
    """Fixed once the trajectory's own reward is known."""
    AFFINE_GROUP = "affine_group"
    """alpha_g * r_i + beta_g, alpha and beta from the group."""
    AFFINE_BATCH = "affine_batch"
    """alpha * r_i + beta, alpha and beta from the whole step."""
    BY_VALUE = "by_value"
    """A function of (r_i, the group's rewards): equal rewards in a group get equal advantages."""
    ARBITRARY = "arbitrary"
    """Any function of the group's rewards and lengths."""


class RewardDomain(enum.StrEnum):
    """The rewards that an estimator is defined on; what leads out of it can be refused at start."""

    ANY = "any"
    NON_NEGATIVE = "non_negative"
    BINARY = "binary"
    """Exactly 0 or 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """The rewards of one group's survivors, in member order."""

    rewards_G: tuple[float, ...]
    lengths_G: tuple[int, ...]
    """[G] action tokens of each trajectory; OPO weighs its baseline by them."""


AdvantageFn = Callable[[Sequence[GroupRewards], float], list[list[float]]]
"""(groups of the step, baseline) -> advantages, same nesting. Estimators of class KNOWN must treat every
reward on its own; those of a group class every group on its own. `baseline` is fixed while a step runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An advantage estimator and the promise it makes about its coefficients.

    The ledger checks the promise at close, on the rewards that came.
    """

    name: str
    coefficient: CoefficientClass
    advantages: AdvantageFn
    batch_scale: Callable[[Sequence[Sequence[float]]], float] | None = None
    """Late scalar on the whole step's gradient, from all advantages (REINFORCE++-baseline divides by their
    deviation)."""
    min_group_size: int = 2
    needs_baseline: bool = False
    """True when `baseline` is the running mean of past rewards."""
    drops_uniform_groups: bool = False
    """True for dynamic sampling: groups with equal rewards leave the normalizer's count too."""
    normalizer: str = "token"
    """Normalizer of the published algorithm, used when the config names none: "token", "trajectory" or
    "constant"."""
    reward_domain: RewardDomain = RewardDomain.ANY
    """Rewards outside it raise at close; KL and overlong terms make rewards leave NON_NEGATIVE and BINARY."""


_REGISTRY: dict[str, Estimator] = {}


def register(estimator: Estimator) -> Estimator:
    """Make an estimator available by name and return it.

    Raises:
        ConfigError: the name is taken by another estimator.
    """
    taken = _REGISTRY.get(estimator.name)
    if taken is not None and taken is not estimator:
        raise ConfigError(f"expected a new estimator name, got {estimator.name!r}, which is registered; choose another")
    _REGISTRY[estimator.name] = estimator
    return estimator


def get_estimator(name: str) -> Estimator:
    """Return the estimator of this name.

    Raises:
        ConfigError: no such name; the message lists the closest and all names.
    """
    import difflib

    import thundersyncrl.algorithms.advantages  # noqa: F401  # pyright: ignore[reportUnusedImport]

    if name not in _REGISTRY:
        close = difflib.get_close_matches(name, _REGISTRY, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ConfigError(f"expected a registered estimator, got {name!r}{hint} Known: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


def estimator_names() -> list[str]:
    """Return all registered names, sorted."""
    import thundersyncrl.algorithms.advantages  # noqa: F401  # pyright: ignore[reportUnusedImport]

    return sorted(_REGISTRY)
