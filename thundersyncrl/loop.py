"""The training loop: sample a step's groups, let the learner work meanwhile, step once, publish.

| who                  | waits for                            | released by           |
| -------------------- | ------------------------------------ | --------------------- |
| rollouts of a step   | the engine's receipt of its version  | `publish`             |
| gradient work        | an item that its level admits        | text, reward, seal    |
| the optimizer step   | every trajectory accounted for       | rollouts and learner  |
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from thundersyncrl.environments.task_order import TaskSource
from thundersyncrl.errors import PublishError, RolloutError
from thundersyncrl.observe.bound import step_time
from thundersyncrl.observe.events import record
from thundersyncrl.observe.observer import Observer
from thundersyncrl.observe.timeline import ASYNCHRONOUS, SHARED_CORE, windows
from thundersyncrl.records import Receipt, Status, StepReport, Task
from thundersyncrl.rollout.collector import EVERY_PLACE, Collector, Played, Sink
from thundersyncrl.rollout.setting import Setting
from thundersyncrl.rollout.task_history import TaskHistory
from thundersyncrl.runtime.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The parts of a run that the loop moves."""

    setting: Setting
    trainer: Trainer
    tasks: TaskSource
    observer: Observer
    groups_per_step: int
    group_size: int
    extra_groups: int = 0
    """Groups that may be started in place of uniform ones."""
    max_retries: int = 1
    history: TaskHistory = field(default_factory=TaskHistory)
    shares_core: bool = False
    """Whether engine and learner take turns on one thread, so that neither can work while the other does."""
    max_staleness: int = 0
    """Steps by which rollouts run ahead, for `ahead.train_ahead`; `train` runs none."""


AfterStep = Callable[[StepReport, int], Awaitable[None]]
"""(report, position in the tasks at which a run resumed after this step goes on)."""


async def train(training: Training, *, first_step: int, num_steps: int, after_step: AfterStep) -> None:
    """Run steps `first_step` .. `num_steps` - 1; engine and learner are serving and the learner's version is live."""
    for step in range(first_step, num_steps):
        report = await train_step(training, step)
        training.observer.step(report)
        await after_step(report, training.tasks.position)


async def train_step(training: Training, step: int) -> StepReport:
    """Return the report of one step: one policy, one gradient, one optimizer step."""
    started = time.monotonic()
    await training.trainer.begin_step()
    collector = collector_of(training, step, training.trainer)
    await roll_out(training, collector, training.tasks.take(training.groups_per_step))
    return await settle(training, collector, started)


async def roll_out(
    training: Training,
    collector: Collector,
    tasks: Sequence[Task],
    *,
    places: AbstractAsyncContextManager[Any] = EVERY_PLACE,
) -> None:
    """Play a step's tasks, and others in place of uniform groups; the latter wait for no place."""
    extra = training.extra_groups
    while tasks:
        await collector.play(tasks, places=places)
        wanted = min(extra, training.groups_per_step - collector.num_groups + collector.num_uniform_groups)
        extra -= wanted
        tasks, places = training.tasks.take(wanted), EVERY_PLACE


async def settle(training: Training, collector: Collector, started: float) -> StepReport:
    """End the step that began at `started`, its rollouts played: the last gradient work, one update, its publish."""
    step, trainer = collector.step, training.trainer
    sampled = time.monotonic()
    trainer.seal()
    metrics = await trainer.finish_step()
    learned = time.monotonic()
    record(training.setting.events, sampled, "controller", "settle", step=step)
    await publish(training)
    times = {"time_rollout_s": sampled - started, "time_learner_tail_s": learned - sampled}
    times["time_publish_s"] = time.monotonic() - learned
    metrics |= _where_time_went(training, step, started)
    return _report(collector, trainer, metrics, times)


def _where_time_went(training: Training, step: int, started_s: float) -> dict[str, float]:
    """Mark the end of a step in the log; return its idle time, overlap and bound, none where nothing is logged."""
    log = training.setting.events
    ahead = f"{ASYNCHRONOUS}, max_staleness {training.max_staleness}" if training.max_staleness else ""
    detail = SHARED_CORE if training.shares_core else ahead
    record(log, started_s, "controller", "step", step=step, detail=detail)
    events = log.flush(step)
    marks = [window for window in windows(events) if window.step == step]
    return step_time(events, marks[-1]).metrics() if marks else {}


async def publish(training: Training) -> Receipt:
    """Make the learner's version live in the engine.

    Raises:
        PublishError: the engine confirms other weights than the learner's.
    """
    version, expected, start = training.trainer.version, training.trainer.digest, time.monotonic()
    receipt = await training.setting.engine.publish(version)
    record(training.setting.events, start, "controller", "publish")
    if (receipt.version, receipt.digest) != (version, expected):
        raise PublishError(
            f"expected a receipt for version {version} with digest {expected}, got version {receipt.version} with "
            f"{receipt.digest}; the engine does not sample from the learner's weights"
        )
    return receipt


def collector_of(
    training: Training, step: int, sink: Sink, *, is_current: Callable[[], bool] = lambda: True
) -> Collector:
    """Return what plays a step's groups into a sink and tells the observer, of progress while the step is current."""

    def on_played(end: Played) -> None:
        training.observer.sample(end.trajectory, end.reward.value if end.reward else None)
        if is_current():
            show_progress(training, collector)

    collector = Collector(
        setting=training.setting,
        sink=sink,
        step=step,
        group_size=training.group_size,
        max_retries=training.max_retries,
        on_played=on_played,
        history=training.history,
    )
    return collector


def show_progress(training: Training, collector: Collector) -> None:
    done, total = len(collector.played), training.groups_per_step * training.group_size
    training.observer.progress("trajectories", done, max(total, done))


def _report(collector: Collector, trainer: Trainer, metrics: dict[str, float], times: dict[str, float]) -> StepReport:
    metrics = dict(metrics)
    played, failures = collector.played, collector.failures
    if played and all(p.reward is None for p in played):
        first = played[0].outcome
        raise RolloutError(
            f"expected at least one trajectory with a verdict, all {len(played)} of step {collector.step} "
            "failed or were dropped; "
            f"first: {first.cause}: {first.reason}"
        )
    return StepReport(
        step=collector.step,
        version=trainer.version - 1,
        num_launched=len(played),
        num_trained=int(metrics.pop("num_survivors")),
        num_dropped=int(metrics.pop("num_dropped")) + sum(p.outcome.status is Status.DROPPED for p in played),
        num_failed=sum(failures.values()),
        failures=dict(failures),
        level=trainer.level,
        metrics={**metrics, **times, **_rollout_metrics(played, sum(times.values()))},
    )


def _rollout_metrics(played: list[Played], seconds: float) -> dict[str, float]:
    values = [p.reward.value for p in played if p.reward is not None]
    tokens = sum(p.trajectory.num_action_tokens for p in played)
    return {
        "reward_mean": sum(values) / max(len(values), 1),
        "pass_rate": sum(v >= 1.0 for v in values) / max(len(values), 1),
        "num_action_tokens": float(tokens),
        "tokens_per_s": tokens / max(seconds, 1e-9),
        "action_tokens_mean": tokens / max(len(played), 1),
        "turns_mean": sum(len(p.trajectory.turns) for p in played) / max(len(played), 1),
        "num_malformed": sum(p.trajectory.metrics.get("num_malformed", 0.0) for p in played),
        "num_truncated": float(sum(p.trajectory.outcome.status is Status.TRUNCATED for p in played)),
        "step_s": seconds,
    }
