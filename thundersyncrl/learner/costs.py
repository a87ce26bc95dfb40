"""What the learner's work has cost so far, by kind: seconds a token, recent work counting most."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass, field

MEMORY = 0.95
"""Weight of what came before, at each new figure: about the last 20 count."""


FRESH_STEPS = 8
"""After how many steps without a measurement a price counts as unknown."""


class Kind(enum.StrEnum):
    """Of work, as far as its price differs."""

    FINAL = "final"
    """Packs whose coefficients are known."""
    OPEN = "open"
    """Packs of a group that isn't complete."""
    EARLY = "early"
    """Forwards of live trajectories."""
    LATE = "late"
    """What is left of trajectories that began early, over all their tokens."""


@dataclass(slots=True)
class Mean:
    """A weighted mean that forgets.

    Example:
        >>> mean = Mean()
        >>> mean.value is None
        True
        >>> mean.add(3.0)
        >>> mean.value
        3.0
    """

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Count one more value."""
        self.total = MEMORY * self.total + value * weight
        self.weight = MEMORY * self.weight + weight

    @property
    def value(self) -> float | None:
        """The mean, None before the first value."""
        return self.total / self.weight if self.weight else None


@dataclass(slots=True)
class _Price:
    mean: Mean = field(default_factory=Mean)
    num: int = 0
    last_step: int = 0


@dataclass(slots=True)
class Costs:
    """Seconds a token of each kind of work.

    The first figure of a kind doesn't count: memory is taken and code is loaded then. A kind that wasn't measured for
    `FRESH_STEPS` steps is unknown again, so that work which a price has ruled out gets another trial.
    """

    prices: defaultdict[Kind, _Price] = field(default_factory=lambda: defaultdict[Kind, _Price](_Price))
    step: int = 0

    def begin_step(self) -> None:
        """Count the steps, by which prices age."""
        self.step += 1

    def add(self, kind: Kind, num_tokens: int, seconds: float) -> None:
        """Count one piece of work."""
        if not num_tokens:
            return
        price = self.prices[kind]
        price.num, price.last_step = price.num + 1, self.step
        if price.num > 1:
            price.mean.add(seconds / num_tokens, num_tokens)

    def of(self, kind: Kind) -> float | None:
        """Return seconds a token, None where nothing recent is known."""
        price = self.prices[kind]
        return price.mean.value if self.step - price.last_step < FRESH_STEPS else None
