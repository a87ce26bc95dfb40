"""A scripted environment: gives set answers, delays and errors, under the same contract as a real one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from thundersyncrl.environments.environment import Observation
from thundersyncrl.errors import EnvironmentFailure
from thundersyncrl.records import Reward

T = TypeVar("T")


@dataclass(frozen=True)  # no slots: Python 3.11 cannot subscript a generic record that has them
class Answer(Generic[T]):
    """What one call does: wait, then return a value or raise an error."""

    value: T | Exception
    delay_s: float = 0.0
    """Infinity hangs until the caller gives up."""

    async def give(self) -> T:
        """Return the value after the delay, or raise it if it's an exception."""
        if math.isinf(self.delay_s):
            await asyncio.Event().wait()
        await asyncio.sleep(self.delay_s)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class ScriptedEnvironment:
    """An environment that gives the answers of a script, one per action.

    Args:
        acts: one answer per action, in order; a further action is an EnvironmentFailure.
        verdict: what the verifier says.
        opening: how `open` goes.
        system_prompt: how the agent is told to act.

    Example:
        >>> async def look() -> str:
        ...     world = ScriptedEnvironment([Answer(Observation(text="notes.txt", done=False))])
        ...     await world.open()
        ...     return (await world.act("ls")).text
        >>> asyncio.run(look())
        'notes.txt'
    """

    def __init__(
        self,
        acts: Sequence[Answer[Observation]] = (),
        *,
        verdict: Answer[Reward] | None = None,
        opening: Answer[None] | None = None,
        system_prompt: str = "Answer with one shell command.",
    ) -> None:
        self.actions: list[str] = []
        """Every action, in order."""
        self.num_opened = 0
        self.num_closed = 0
        self._acts = tuple(acts)
        self._verdict = Answer(Reward(value=1.0)) if verdict is None else verdict
        self._opening = Answer(None) if opening is None else opening
        self._system_prompt = system_prompt

    @property
    def system_prompt(self) -> str:
        return self._system_prompt

    async def open(self) -> None:
        self.num_opened += 1
        if self.num_opened > 1:
            raise EnvironmentFailure("expected a fresh environment, got one that was opened before; make another")
        await self._opening.give()

    async def act(self, action_text: str) -> Observation:
        self._check_open("act")
        if len(self.actions) == len(self._acts):
            raise EnvironmentFailure(
                f"expected at most {len(self._acts)} actions, got another: {action_text!r}; script one more"
            )
        answer = self._acts[len(self.actions)]
        self.actions.append(action_text)
        return await answer.give()

    async def grade(self) -> Reward:
        self._check_open("grade")
        return await self._verdict.give()

    async def close(self) -> None:
        self.num_closed += 1

    def _check_open(self, call: str) -> None:
        if self.num_opened == 0 or self.num_closed > 0:
            raise EnvironmentFailure(f"expected an open environment, got `{call}` before open or after close")
