"""What the episodes of a run share: engine, renderer, environments, limits, the seed, and the log of events."""

from __future__ import annotations

from dataclasses import dataclass, field

from thundersyncrl.environments.environment import EnvironmentFactory
from thundersyncrl.observe.events import EventLog, NoEvents
from thundersyncrl.rollout.engine import Engine
from thundersyncrl.rollout.renderer import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one trajectory may use."""

    max_turns: int
    max_turn_tokens: int
    """Sampled tokens of one turn."""
    max_action_tokens: int
    """Sampled tokens of the whole trajectory."""
    context_tokens: int
    """Prompt, actions and observations together; the engine's own limit holds too."""
    trajectory_limit_s: float
    """Wall time from opening the world to the end of the text."""
    grade_limit_s: float
    """Wall time of the verifier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the episodes of a run share."""

    engine: Engine
    renderer: Renderer
    environment_factory: EnvironmentFactory
    limits: Limits
    temperature: float
    seed: int
    """The run's seed; each request gets its own from it."""
    events: EventLog = field(default_factory=NoEvents)
    """Hears of everything that takes time."""
