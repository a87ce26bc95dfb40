"""A learner with all that a run asks of it, wherever it lives: called by method name, through a `Transport`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thundersyncrl.config import WarmStartConfig
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.supervised import Supervised
from thundersyncrl.observe.events import Event, EventLog, NoEvents, record
from thundersyncrl.records import GroupId, Trajectory, TrajectoryId, Turn
from thundersyncrl.runtime.checkpoint import Progress, load_checkpoint, save_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where the run stands, apart from what the learner knows itself."""

    next_step: int
    task_position: int
    pass_rates: dict[str, float]
    seconds: float


class LearnerHost:
    """Owned by one compute thread; the sink's methods may be called from any.

    Args:
        learner: of the policy under training.
        pack_tokens: largest pack of supervised steps.
    """

    def __init__(self, learner: Learner, *, pack_tokens: int):
        self.learner = learner
        self.events: EventLog = NoEvents()
        self._pack_tokens = pack_tokens
        self._supervised: Supervised | None = None

    # -- the sink: no answers ----------------------------------------------------------------------------------

    def open_group(self, group: GroupId, members: Iterable[TrajectoryId]) -> None:
        self.learner.open_group(group, members)

    def turn(self, member: TrajectoryId, turns: Sequence[Turn], expected_turns: float | None = None) -> None:
        self.learner.turn(member, turns, expected_turns=expected_turns)

    def text(self, trajectory: Trajectory) -> None:
        self.learner.text(trajectory)

    def reward(self, member: TrajectoryId, reward: float) -> None:
        self.learner.reward(member, reward)

    def lose(self, member: TrajectoryId) -> None:
        self.learner.lose(member)

    def seal(self) -> None:
        self.learner.seal()

    # -- work --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.learner.has_work

    @property
    def recheck_s(self) -> float | None:
        """After how many seconds to ask for work again though nothing new has come; None for never."""
        return self.learner.recheck_s

    @property
    def has_sure_work(self) -> bool:
        return self.learner.has_sure_work

    def run_once(self, *, sure_only: bool = False) -> None:
        """Run one slice of the learner, and log it: a pack once for each of its trajectories."""
        start = time.monotonic()
        self.learner.run_once(sure_only=sure_only)
        end = time.monotonic()
        self.events.extend(slice_events(self.learner, start, end))

    # -- answers -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self.learner.begin_step()

    def finish_step(self) -> tuple[dict[str, float], str, int, str]:
        """Run what work is left, step once; return the step's metrics and level, the new version and its digest."""
        while self.learner.has_work:
            self.run_once()
        start = time.monotonic()
        metrics = self.learner.finish_step()
        digest = self.learner.policy.digest()
        record(self.events, start, "learner", "optimizer", detail=self.learner.level)
        return metrics, self.learner.level, self.learner.version, digest

    def begin_version(self, version: int) -> str:
        """Take the number under which the engine made the present weights live; return their digest."""
        self.learner.version = version
        return self.learner.policy.digest()

    def begin_supervised(self, settings: WarmStartConfig) -> None:
        self._supervised = Supervised(self.learner.policy, settings, pack_tokens=self._pack_tokens)

    def supervised_step(self, transcripts: Sequence[Trajectory]) -> float:
        """Return the mean log-prob of the transcripts' action tokens before the step, in nats."""
        assert self._supervised is not None, "begin_supervised comes first"
        start = time.monotonic()
        logprob = self._supervised.step(transcripts)
        record(self.events, start, "learner", "supervised step")
        return logprob

    def save(self, folder: Path, stand: Stand) -> None:
        """Write a checkpoint."""
        mean = self.learner.running_mean
        progress = Progress(
            next_step=stand.next_step,
            version=self.learner.version,
            task_position=stand.task_position,
            num_rewards=mean.num_rewards,
            reward_mean=mean.mean,
            pass_rates=dict(stand.pass_rates),
            seconds=stand.seconds,
        )
        save_checkpoint(folder, self.learner, progress)

    def load(self, checkpoint: Path) -> tuple[Progress, str]:
        """Load a checkpoint in place; return where the run stood and the weights' digest."""
        progress = load_checkpoint(checkpoint, self.learner)
        return progress, self.learner.policy.digest()


def slice_events(learner: Learner, start_s: float, end_s: float) -> list[Event]:
    """Return what a learner's slice was: its pack, or only that it worked."""
    pack = learner.last_pack
    if pack is None:
        return [Event(actor="learner", what="work", start_s=start_s, end_s=end_s)]
    return [
        Event(
            actor="learner",
            what="pack",
            start_s=start_s,
            end_s=end_s,
            step=branch.id.step,
            trajectory=str(branch.id),
            tokens=branch.num_tokens,
            detail=str(pack.work_class),
        )
        for branch in pack.branches
    ]
