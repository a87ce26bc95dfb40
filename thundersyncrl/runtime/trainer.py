"""What a run asks of its learner, whether that lives in this process or in another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from thundersyncrl.config import WarmStartConfig
from thundersyncrl.records import GroupId, Trajectory, TrajectoryId, Turn
from thundersyncrl.runtime.checkpoint import Progress
from thundersyncrl.runtime.learner_host import Stand

STEP_LIMIT_S = 3600.0
"""For the work that is left when a step's rollouts have ended, a supervised step, a checkpoint's reading or writing."""


class Transport(Protocol):
    """Carries calls to a `LearnerHost`, in order."""

    def tell(self, method: str, *args: Any) -> None:
        """Call without an answer; an error ends the run."""
        ...

    async def ask(self, method: str, *args: Any, limit_s: float) -> Any:
        """Call, and return or raise what it did."""
        ...


class Trainer:
    """A typed face of a `LearnerHost` behind a transport; also the sink of the collector.

    Args:
        transport: to the host.
        takes_turns: whether the learner makes use of the finished turns of live trajectories.
    """

    def __init__(self, transport: Transport, *, takes_turns: bool = False):
        self._transport = transport
        self._takes_turns = takes_turns
        self.version = 0
        """Of the learner's weights."""
        self.level = ""
        """At which level the last step's gradient work was done, and with "auto" why."""
        self.digest = ""
        """Of the weights of `version`; a receipt of the engine must show the same."""

    def open_group(self, group: GroupId, members: Iterable[TrajectoryId]) -> None:
        self._transport.tell("open_group", group, tuple(members))

    def turn(self, member: TrajectoryId, turns: Sequence[Turn], *, expected_turns: float | None = None) -> None:
        if self._takes_turns:
            self._transport.tell("turn", member, tuple(turns), expected_turns)

    def text(self, trajectory: Trajectory) -> None:
        self._transport.tell("text", trajectory)

    def reward(self, member: TrajectoryId, reward: float) -> None:
        self._transport.tell("reward", member, reward)

    def lose(self, member: TrajectoryId) -> None:
        self._transport.tell("lose", member)

    def seal(self) -> None:
        self._transport.tell("seal")

    async def begin_step(self) -> None:
        await self._ask("begin_step")

    async def finish_step(self) -> dict[str, float]:
        """Wait for the step's last work, step once, and return the step's metrics."""
        metrics, self.level, self.version, self.digest = await self._ask("finish_step")
        return metrics

    async def begin_version(self, version: int) -> None:
        """Number the present weights."""
        self.digest = await self._ask("begin_version", version)
        self.version = version

    async def begin_supervised(self, settings: WarmStartConfig) -> None:
        await self._ask("begin_supervised", settings)

    async def supervised_step(self, transcripts: Sequence[Trajectory]) -> float:
        return await self._ask("supervised_step", tuple(transcripts))

    async def save(self, folder: Path, stand: Stand) -> None:
        await self._ask("save", folder, stand)

    async def load(self, checkpoint: Path) -> Progress:
        progress, self.digest = await self._ask("load", checkpoint)
        self.version = progress.version
        return progress

    async def _ask(self, method: str, *args: Any) -> Any:
        return await self._transport.ask(method, *args, limit_s=STEP_LIMIT_S)
