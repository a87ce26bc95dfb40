"""What the learner's work has cost so far, by kind: seconds a token, recent work counting most."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass, field

MEMORY = 0.95
"""Weight of what came before, at each new figure: about the last 20 count."""


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
class Costs:
    """Seconds a token of each kind of work."""

    means: defaultdict[Kind, Mean] = field(default_factory=lambda: defaultdict[Kind, Mean](Mean))

    def add(self, kind: Kind, num_tokens: int, seconds: float) -> None:
        """Count one piece of work."""
        if num_tokens:
            self.means[kind].add(seconds / num_tokens, num_tokens)

    def of(self, kind: Kind) -> float | None:
        """Return seconds a token, None before the first work of this kind."""
        return self.means[kind].value
