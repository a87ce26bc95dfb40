"""The environment protocol: one single-use world for one trajectory. It speaks text, never tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from thundersyncrl.records import Reward, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the agent sees after its action."""

    text: str
    """Shown to the model as the next user message; empty when `done`."""
    done: bool
    """True when the agent said that it has finished."""
    is_malformed: bool = False
    """True when the action could not be read as a command; `text` then says what was expected."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Such as `tool_s`, `exit_code`."""


class Environment(Protocol):
    """One world for one trajectory; single use, no reset.

    Raises of each method: EnvironmentFailure (lost or could not be built), ToolError (the tool itself broke),
    VerifierError (no verdict), TimeLimitError (which limit). A command that fails or times out is an
    Observation, never an exception.
    """

    @property
    def system_prompt(self) -> str:
        """How the agent is told to act."""
        ...

    async def open(self) -> None:
        """Build the world."""
        ...

    async def act(self, action_text: str) -> Observation:
        """Carry out one action and return what the agent sees."""
        ...

    async def grade(self) -> Reward:
        """Run the verifier on the world as it stands."""
        ...

    async def close(self) -> None:
        """Kill every process and remove every file of this world. Idempotent; never raises."""
        ...


class EnvironmentFactory(Protocol):
    """Makes a fresh environment for a task."""

    def __call__(self, task: Task) -> Environment: ...
