"""The workload of `bench overlap`: how many turns each trajectory takes, how long its tools last, what they print.

Turns and latencies are heavy-tailed, as those of software agents: log-normal, cut at a limit. Members of a group share
part of what they draw: each normal deviate is sqrt(rho) z_group + sqrt(1 - rho) z_member, so that rho is the
correlation of two members' logarithms. Everything depends on the seed, the task and the member alone, never on the arm.
"""

from __future__ import annotations

import asyncio
import math
import random
import shlex
from collections import Counter
from dataclasses import dataclass

from thundersyncrl.config import EnvironmentConfig
from thundersyncrl.environments.environment import Environment, EnvironmentFactory, Observation
from thundersyncrl.environments.isolation import Isolation
from thundersyncrl.environments.limits import Limits
from thundersyncrl.environments.process import in_thread
from thundersyncrl.environments.sandbox import Sandbox
from thundersyncrl.errors import ToolError
from thundersyncrl.records import Reward, Task

_LETTERS = "abcdefghijklmnopqrstuvwxyz    "


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A heavy-tailed quantity: median * exp(sigma z), z normal, cut to lie between `least` and `most`."""

    median: float
    sigma: float
    least: float
    most: float

    def at(self, deviate: float) -> float:
        """Return the value at a normal deviate.

        Example:
            >>> LogNormal(median=0.4, sigma=1.0, least=0.0, most=8.0).at(0.0)
            0.4
        """
        return min(self.most, max(self.least, self.median * math.exp(self.sigma * deviate)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of one step, and the distributions of what its environments do."""

    num_groups: int = 8
    group_size: int = 8
    turns: LogNormal = LogNormal(median=4.0, sigma=0.7, least=1.0, most=12.0)
    tool_s: LogNormal = LogNormal(median=0.4, sigma=1.0, least=0.0, most=8.0)
    """Of each tool call, and of the verifier."""
    observation_tokens: LogNormal = LogNormal(median=128.0, sigma=0.5, least=8.0, most=384.0)
    """The benchmark's tokenizer has a token a letter."""
    prompt_tokens: int = 160
    turn_tokens: int = 24
    """Sampled tokens of a turn, at most."""
    seed: int = 0

    @property
    def max_turns(self) -> int:
        return round(self.turns.most)

    @property
    def context_tokens(self) -> int:
        """Room for the longest trajectory that can be drawn, with the chat template's own tokens."""
        template = 128
        of_turn = self.turn_tokens + round(self.observation_tokens.most) + template
        return self.prompt_tokens + template + self.max_turns * of_turn

    def tasks(self, name: str, num_steps: int) -> list[Task]:
        """Return the tasks of some steps, each for one group."""
        made: list[Task] = []
        for index in range(num_steps * self.num_groups):
            id = f"{name}/{index}"
            made.append(Task(id=id, instruction=_text(random.Random(f"{self.seed}/{id}/prompt"), self.prompt_tokens)))
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one trajectory's environment will do."""

    tools_s: tuple[float, ...]
    """Seconds of each turn's tool call; as many as turns."""
    observations: tuple[str, ...]
    """What each call prints; the last ends the trajectory and is empty."""
    verifier_s: float
    reward: float

    @property
    def num_turns(self) -> int:
        return len(self.tools_s)


def draw_script(workload: Workload, *, rho: float, task_id: str, member: int) -> Script:
    """Return a member's script; two members of a group always have different rewards.

    Example:
        >>> script = draw_script(Workload(), rho=0.5, task_id="a", member=0)
        >>> script == draw_script(Workload(), rho=0.5, task_id="a", member=0), script.num_turns <= 12
        (True, True)
    """
    shared = random.Random(f"{workload.seed}/{task_id}")
    own = random.Random(f"{workload.seed}/{task_id}/{member}")

    def deviate() -> float:
        return math.sqrt(rho) * shared.gauss(0.0, 1.0) + math.sqrt(1 - rho) * own.gauss(0.0, 1.0)

    first_reward = shared.randrange(2)
    num_turns = round(workload.turns.at(deviate()))
    # all turns are drawn, so that a turn's draws don't depend on how many there are
    seconds = [workload.tool_s.at(deviate()) for _ in range(workload.max_turns)]
    lengths = [round(workload.observation_tokens.at(deviate())) for _ in range(workload.max_turns)]
    verifier_s = workload.tool_s.at(deviate())
    drawn = own.randrange(2)
    texts = [_text(own, length) for length in lengths]
    return Script(
        tools_s=tuple(seconds[:num_turns]),
        observations=(*texts[: num_turns - 1], ""),
        verifier_s=verifier_s,
        reward=float((first_reward + member) % 2 if member < 2 else drawn),
    )


def _text(source: random.Random, num_letters: int) -> str:
    return "".join(source.choices(_LETTERS, k=num_letters)).replace("  ", " a").strip().ljust(num_letters, "z")


class ToolWorld:
    """An environment that ends after its script's turns, whatever the policy writes.

    Args:
        script: of this trajectory.
        sandbox: where the tool calls sleep; None: in the controller itself.
        limits: of a command in the sandbox.
    """

    system_prompt = "Use the tool."

    def __init__(self, script: Script, sandbox: Sandbox | None, limits: Limits):
        self._script = script
        self._sandbox = sandbox
        self._limits = limits
        self._turn = 0

    async def open(self) -> None:
        if self._sandbox is not None:
            await in_thread(self._sandbox.open)

    async def act(self, action_text: str) -> Observation:
        """Sleep as long as the script says and return what it prints.

        Raises:
            ToolError: the sandbox printed something else.
        """
        turn, self._turn = self._turn, self._turn + 1
        text = await self._call(self._script.tools_s[turn], self._script.observations[turn])
        return Observation(text=text, done=self._turn == self._script.num_turns)

    async def grade(self) -> Reward:
        """Sleep for the verifier's time and return the drawn reward; raises as `act`."""
        await self._call(self._script.verifier_s, "")
        return Reward(value=self._script.reward)

    async def _call(self, seconds: float, text: str) -> str:
        if self._sandbox is None:
            await asyncio.sleep(seconds)
            return text
        result = await self._sandbox.run(f"sleep {seconds:.4f}; printf %s {shlex.quote(text)}", limits=self._limits)
        if result.output.strip() != text.strip() or result.exit_code:
            raise ToolError(
                f"expected {len(text)} letters from the sandbox, got {result.output[:200]!r} with exit code "
                f"{result.exit_code}, limit {result.limit!r}; is the machine out of memory or processes?"
            )
        return text

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.stop()
            await in_thread(self._sandbox.close)


def tool_worlds(workload: Workload, *, rho: float, isolation: Isolation | None) -> EnvironmentFactory:
    """Return a factory that gives the worlds of a task's group to its members in the order in which they are opened.

    Args:
        workload: what is drawn.
        rho: correlation inside a group.
        isolation: how sandboxes are made; None: none are, tools sleep in the controller.
    """
    limits = Limits.from_settings(EnvironmentConfig(command_limit_s=workload.tool_s.most + 30.0))
    opened: Counter[str] = Counter()

    def make(task: Task) -> Environment:
        # the collector starts a group's members in their order; a retry goes round
        member = opened[task.id] % workload.group_size
        opened[task.id] += 1
        script = draw_script(workload, rho=rho, task_id=task.id, member=member)
        return ToolWorld(script, Sandbox(isolation, limits=limits) if isolation else None, limits)

    return make
