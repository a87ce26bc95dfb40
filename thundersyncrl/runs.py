"""The whole runs that the commands start: train, warm start alone, evaluate, roll out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thundersyncrl.ahead import train_ahead
from thundersyncrl.build import Parts, build, placement_of, setting_of
from thundersyncrl.config import Config
from thundersyncrl.environments.task_order import TaskOrder
from thundersyncrl.evaluation import evaluate, play_all
from thundersyncrl.loop import Training, publish, train
from thundersyncrl.observe.event_file import EventWriter
from thundersyncrl.observe.events import record
from thundersyncrl.observe.observer import EvaluationResult, Observer
from thundersyncrl.records import StepReport
from thundersyncrl.runtime.checkpoint import latest_checkpoint, load_weights
from thundersyncrl.runtime.json_lines import read_lines
from thundersyncrl.runtime.learner_host import Stand
from thundersyncrl.runtime.run_folder import RunFolder
from thundersyncrl.warm_start import WarmStart, run_warm_start


@asynccontextmanager
async def _serving(parts: Parts) -> AsyncGenerator[None, None]:
    """Serve engine and learner while the body runs; an error of either ends both."""
    server = asyncio.ensure_future(parts.runtime.serve())
    body = asyncio.current_task()
    failed: list[BaseException] = []

    def stop(task: asyncio.Future[None]) -> None:
        if not task.cancelled() and task.exception() is not None and body is not None:
            failed.append(task.exception() or RuntimeError())
            body.cancel()

    server.add_done_callback(stop)
    try:
        yield
    except asyncio.CancelledError:
        if failed:
            raise failed[0] from None
        raise
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        await parts.engine.close()
        await parts.runtime.close()


async def _evaluate(parts: Parts, name: str) -> EvaluationResult | None:
    settings = parts.config.evaluation
    if settings is None:
        return None
    parts.observer.phase("evaluation", name)
    start = time.monotonic()
    setting = setting_of(parts, temperature=settings.temperature, seed=parts.config.seed + 1)
    result = await evaluate(
        setting,
        parts.heldout_tasks,
        samples_per_task=settings.samples_per_task,
        observer=parts.observer,
    )
    record(parts.events, start, "controller", "evaluation", detail=name)
    parts.pass_rates[name] = result.pass_rate
    parts.observer.evaluation(name, result)
    return result


async def _warm_start(parts: Parts) -> None:
    settings = parts.config.warm_start
    if settings is None:
        return
    parts.observer.phase("warm start", f"{settings.steps} supervised steps on {settings.batch_size} transcripts each")
    start = time.monotonic()
    await run_warm_start(
        WarmStart(
            trainer=parts.trainer,
            renderer=parts.renderer,
            environment_factory=parts.environments,
            tasks=TaskOrder(parts.train_tasks, seed=parts.config.seed + 2, weights=settings.weights),
            observer=parts.observer,
            settings=settings,
        )
    )
    record(parts.events, start, "controller", "warm start")


def train_run(config: Config, *, resume: bool, sink: Observer) -> dict[str, Any]:
    """Run the whole job and return its summary (`pass_rate_before`, `pass_rate_warm`, `pass_rate_after`)."""
    return asyncio.run(_train_run(config, resume=resume, observer=sink))


async def _train_run(config: Config, *, resume: bool, observer: Observer) -> dict[str, Any]:
    start, folder, placement = time.monotonic(), RunFolder(Path(config.run)), placement_of(config)
    parts = await build(config, observer, placement=placement, events=EventWriter(folder.events))
    record(parts.events, start, "controller", "start-up", detail=placement)
    run = _RunState(parts, folder)
    try:
        async with _serving(parts):
            first_step = await run.resume() if resume else await _prepare(parts, run)
            parts.events.flush(first_step - 1)
            order = TaskOrder(
                parts.train_tasks, seed=_data_seed(config), position=run.task_position, weights=config.tasks.weights
            )
            training = Training(
                setting=setting_of(parts, temperature=config.rollout.temperature, seed=config.seed),
                trainer=parts.trainer,
                tasks=order,
                observer=observer,
                groups_per_step=config.rollout.groups_per_step,
                group_size=config.rollout.group_size,
                extra_groups=config.algorithm.extra_groups,
                max_retries=config.rollout.max_retries,
                shares_core=placement == "inline",
                max_staleness=config.rollout.max_staleness,
            )
            ahead = f", rollouts up to {training.max_staleness} steps ahead" if training.max_staleness else ""
            groups = config.rollout.groups_per_step
            observer.phase("training", f"{config.steps} steps of {groups} groups{ahead}")
            if resume:
                await publish(training)
            await _train_in_parts(parts, run, training, first_step)
            await _evaluate(parts, "after")
    finally:
        parts.events.flush(run.next_step)  # what led to a failure is on disk too
    return run.summary()


async def _prepare(parts: Parts, run: _RunState) -> int:
    await parts.engine.publish(0)
    await _evaluate(parts, "before")
    if parts.config.warm_start is not None:
        await _warm_start(parts)
        await parts.engine.publish(1)
        await _evaluate(parts, "warm")
    await parts.trainer.begin_version(parts.engine.version)
    await run.save(next_step=0, position=0)
    return 0


async def _train_in_parts(parts: Parts, run: _RunState, training: Training, first_step: int) -> None:
    """Train, stopping where an evaluation is due; checkpoints are written after steps.

    Rollouts run ahead only as far as the next stop, so that none competes with an evaluation.
    """
    config, every = parts.config, parts.config.evaluation.every if parts.config.evaluation else 0

    async def after_step(report: StepReport, position: int) -> None:
        run.note(report)
        done = report.step + 1
        if done == config.steps or (config.checkpoint_every and done % config.checkpoint_every == 0):
            await run.save(next_step=done, position=position)

    step, run_steps = first_step, train_ahead if training.max_staleness else train
    while step < config.steps:
        end = min(config.steps, (step // every + 1) * every) if every else config.steps
        await run_steps(training, first_step=step, num_steps=end, after_step=after_step)
        step = end
        if every and step < config.steps:
            await _evaluate(parts, f"step {step}")


class _RunState:
    """What a run remembers between its parts, and saves."""

    def __init__(self, parts: Parts, folder: RunFolder):
        self._parts = parts
        self._folder = folder
        self._started = time.monotonic()
        self._seconds_before = 0.0
        self._mismatch_max = 0.0
        self.task_position = 0
        self.next_step = 0

    async def resume(self) -> int:
        progress = await self._parts.trainer.load(latest_checkpoint(self._folder.path))
        self._folder.truncate(progress.next_step)
        earlier = read_lines(self._folder.metrics) if self._folder.metrics.exists() else []
        self._mismatch_max = max((row.get("mismatch_max", 0.0) for row in earlier), default=0.0)
        self._parts.pass_rates.update(progress.pass_rates)
        self.task_position, self._seconds_before = progress.task_position, progress.seconds
        self.next_step = progress.next_step
        return progress.next_step

    def note(self, report: StepReport) -> None:
        self.next_step = report.step + 1
        self._mismatch_max = max(self._mismatch_max, report.metrics.get("mismatch_max", 0.0))

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    async def save(self, *, next_step: int, position: int) -> None:
        stand = Stand(
            next_step=next_step,
            task_position=position,
            pass_rates=dict(self._parts.pass_rates),
            seconds=self.seconds,
        )
        await self._parts.trainer.save(self._folder.checkpoints, stand)

    def summary(self) -> dict[str, Any]:
        rates = self._parts.pass_rates
        return {
            **{f"pass_rate_{name}": rates.get(name) for name in ("before", "warm", "after")},
            "seconds": round(self.seconds, 1),
            "steps": self._parts.config.steps,
            "mismatch_max": self._mismatch_max,
            "run": str(self._folder.path),
        }


def _data_seed(config: Config) -> int:
    return config.seed if config.data_seed is None else config.data_seed


def sft_run(config: Config, observer: Observer) -> dict[str, Any]:
    """Run only the warm start, evaluate, and keep a checkpoint."""

    async def run() -> dict[str, Any]:
        # a supervised step and an evaluation have nothing to overlap with
        parts = await build(config, observer, placement="inline")
        state = _RunState(parts, RunFolder(Path(config.run)))
        async with _serving(parts):
            await _prepare(parts, state)
        return state.summary()

    return asyncio.run(run())


def eval_run(config: Config, *, checkpoint: Path | None, observer: Observer) -> dict[str, Any]:
    """Evaluate the model as it comes, or a run's newest checkpoint."""

    async def run() -> dict[str, Any]:
        parts = await build(config, observer, placement="inline")
        if checkpoint is not None:
            assert parts.policy is not None
            load_weights(parts.policy, latest_checkpoint(checkpoint))
        async with _serving(parts):
            await parts.engine.publish(0)
            result = await _evaluate(parts, "after" if checkpoint else "before")
        return asdict(result) if result else {}

    return asyncio.run(run())


def rollout_run(config: Config, *, num: int, output: Path, observer: Observer) -> dict[str, Any]:
    """Sample groups of training tasks into a JSONL file, without a learner step."""

    async def run() -> dict[str, Any]:
        parts = await build(config, observer, placement="inline")
        async with _serving(parts):
            await parts.engine.publish(0)
            setting = setting_of(parts, temperature=config.rollout.temperature, seed=config.seed)
            tasks = TaskOrder(parts.train_tasks, seed=_data_seed(config)).take(num)
            observer.phase("rollout", f"{num} groups of {config.rollout.group_size}")
            ends = await play_all(
                setting,
                tasks,
                samples_per_task=config.rollout.group_size,
                observer=observer,
            )
        rows = [_row(end.trajectory, end.reward.value if end.reward else None) for end in ends]
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        return {
            "trajectories": len(rows),
            "reward_mean": sum(rewards) / max(len(rewards), 1),
            "num_failed": len(rows) - len(rewards),
            "output": str(output),
        }

    return asyncio.run(run())


def _row(trajectory: Any, reward: float | None) -> dict[str, Any]:
    return {
        "id": str(trajectory.id),
        "task": trajectory.task.id,
        "outcome": trajectory.outcome.status.value,
        "reason": trajectory.outcome.reason,
        "reward": reward,
        "token_ids": trajectory.token_ids,
        "action_mask": [int(m) for m in trajectory.action_mask],
        "behavior_logprobs": trajectory.behavior_logprobs,
        "version": trajectory.version,
        "messages": [dict(m) for m in trajectory.messages],
    }
