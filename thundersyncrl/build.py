"""Config to objects: the only factory, and the whole runs that the commands start."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from thundersyncrl.algorithms.estimator import Estimator, RewardDomain, get_estimator
from thundersyncrl.algorithms.shaping import kl_to_reference, overlong_penalty, shaped_reward
from thundersyncrl.algorithms.weights import choose_normalizer
from thundersyncrl.config import Config, EvaluationConfig
from thundersyncrl.environments.environment import EnvironmentFactory
from thundersyncrl.environments.harbor import load_tasks
from thundersyncrl.environments.shell import shell_environments
from thundersyncrl.environments.shell_tasks import make_tasks
from thundersyncrl.environments.shell_tasks.generate import Split
from thundersyncrl.environments.task_order import TaskOrder
from thundersyncrl.errors import ConfigError
from thundersyncrl.evaluation import evaluate, play_all
from thundersyncrl.learner.branch import BranchTokens
from thundersyncrl.learner.learner import Learner, Objective, RewardShaper, WorkLimits
from thundersyncrl.learner.optimizer import PolicyOptimizer
from thundersyncrl.learner.policy import Policy, load_policy
from thundersyncrl.learner.reference import ReferencePolicy
from thundersyncrl.loop import Training, publish, train
from thundersyncrl.observe.observer import EvaluationResult, Observer
from thundersyncrl.records import StepReport, Task
from thundersyncrl.rollout.driver import Limits, Setting
from thundersyncrl.rollout.embedded import EmbeddedEngine
from thundersyncrl.rollout.renderer import Renderer
from thundersyncrl.runtime.checkpoint import (
    Progress,
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from thundersyncrl.runtime.inline import InlineRuntime
from thundersyncrl.runtime.run_folder import RunFolder
from thundersyncrl.warm_start import WarmStart, run_warm_start


@dataclass(slots=True, kw_only=True)
class Parts:
    """Everything that a run is made of."""

    config: Config
    policy: Policy
    renderer: Renderer
    environments: EnvironmentFactory
    engine: EmbeddedEngine
    learner: Learner
    runtime: InlineRuntime
    train_tasks: list[Task]
    heldout_tasks: list[Task]
    observer: Observer
    pass_rates: dict[str, float] = field(default_factory=dict[str, float])


def objective_of(config: Config, policy: Policy) -> Objective:
    """Return what the config's algorithm maximises."""
    settings = config.algorithm
    estimator = get_estimator(settings.estimator)
    _refuse_without_effect(config, estimator)
    return Objective(
        estimator=estimator,
        normalizer=choose_normalizer(
            estimator.normalizer,
            name=settings.normalizer,
            constant_length=settings.constant_length,
            longest=config.rollout.max_action_tokens,
        ),
        temperature=config.rollout.temperature,
        importance_cap=settings.importance_cap,
        shape_reward=_reward_shaper(config, policy),
    )


def _refuse_without_effect(config: Config, estimator: Estimator) -> None:
    if config.algorithm.extra_groups and not estimator.drops_uniform_groups:
        raise ConfigError(
            f"`algorithm.extra_groups` has no effect with `algorithm.estimator = {estimator.name!r}`, which keeps "
            'uniform groups; remove it or choose "dapo"'
        )
    if config.rollout.group_size < estimator.min_group_size:
        raise ConfigError(
            f"expected `rollout.group_size` of at least {estimator.min_group_size} for {estimator.name!r}, "
            f"got {config.rollout.group_size}"
        )


    shapes = config.algorithm.kl_coefficient > 0 or config.algorithm.overlong_tokens > 0
    if shapes and estimator.reward_domain is not RewardDomain.ANY:
        raise ConfigError(
            f"`algorithm.kl_coefficient` and `algorithm.overlong_tokens` shift the rewards, but {estimator.name!r} is "
            f"defined on {estimator.reward_domain.value} rewards only; set both to 0 or choose another estimator"
        )


def _reward_shaper(config: Config, policy: Policy) -> RewardShaper | None:
    settings, rollout = config.algorithm, config.rollout
    if not settings.kl_coefficient and not settings.overlong_tokens:
        return None
    reference = ReferencePolicy(policy) if settings.kl_coefficient else None

    def shape(branch: BranchTokens, reward: float) -> float:
        overlong, kl = 0.0, 0.0
        if settings.overlong_tokens:
            overlong = overlong_penalty(
                len(branch.target_ids), max_length=rollout.max_action_tokens, buffer=settings.overlong_tokens
            )
        if reference is not None:
            kl = kl_to_reference(branch.behavior_logprobs, reference.logprobs(branch, temperature=rollout.temperature))
        return shaped_reward(reward, kl=kl, kl_coefficient=settings.kl_coefficient, overlong=overlong)

    return shape


def build(config: Config, observer: Observer) -> Parts:
    """Return the parts of a run; everything that can be refused is refused here."""
    torch.set_num_threads(config.model.threads or os.cpu_count() or 1)
    train_tasks, heldout_tasks = _tasks(config, observer)
    observer.phase("loading the model", config.model.path)
    policy, tokenizer = load_policy(config.model, seed=config.seed)
    objective = objective_of(config, policy)
    renderer = Renderer(tokenizer)
    engine = EmbeddedEngine(
        policy,
        context_tokens=config.rollout.context_tokens,
        max_concurrent=config.rollout.max_concurrent,
        cache_tokens=config.rollout.cache_tokens,
    )
    optimizer = PolicyOptimizer(policy.trained, config.learner, total_steps=config.steps)
    limits = WorkLimits(
        stream=config.learner.stream,
        pack_tokens=config.learner.pack_tokens,
        graph_tokens=config.learner.graph_tokens,
        max_open_groups=config.learner.max_open_groups,
        max_mismatch=config.learner.max_mismatch,
    )
    learner = Learner(policy, objective, limits, optimizer)
    runtime = InlineRuntime(engine, learner, num_sequences=lambda: engine.stats.num_running + engine.stats.num_waiting)
    engine.on_work = runtime.wake
    return Parts(
        config=config,
        policy=policy,
        renderer=renderer,
        environments=shell_environments(config.environment),
        engine=engine,
        learner=learner,
        runtime=runtime,
        train_tasks=train_tasks,
        heldout_tasks=heldout_tasks,
        observer=observer,
    )


def _tasks(config: Config, observer: Observer) -> tuple[list[Task], list[Task]]:
    settings, base = config.tasks, Path(config.run) / "tasks"
    folders: list[Path] = []
    splits: tuple[tuple[Split, str, int], ...] = (
        ("train", settings.train, settings.num_train),
        ("heldout", settings.heldout, settings.num_heldout),
    )
    for split, given, num in splits:
        folder = Path(given) if given else base / split
        if not given:  # the same call writes the same set, so an interrupted one is made whole
            observer.phase("making tasks", f"{num} {split} tasks in {folder}")
            make_tasks(
                folder,
                num=num,
                seed=config.seed,
                split=split,
                kinds=settings.kinds,
                difficulties=settings.difficulties,
            )
        folders.append(folder)
    train_tasks, heldout_tasks = (_chosen(load_tasks(folder, kinds=settings.kinds), config) for folder in folders)
    if config.evaluation is not None:
        heldout_tasks = heldout_tasks[: config.evaluation.num_tasks]
    return train_tasks, heldout_tasks


def _chosen(tasks: list[Task], config: Config) -> list[Task]:
    wanted = config.tasks.difficulties
    return [task for task in tasks if not wanted or task.difficulty in wanted]


def _setting(parts: Parts, *, temperature: float, seed: int) -> Setting:
    rollout, environment = parts.config.rollout, parts.config.environment
    limits = Limits(
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        max_action_tokens=rollout.max_action_tokens,
        context_tokens=rollout.context_tokens,
        trajectory_limit_s=rollout.trajectory_limit_s,
        # commands and verifiers queue for a place; this is the wall time with the wait
        grade_limit_s=environment.verifier_limit_s + rollout.trajectory_limit_s,
    )
    return Setting(
        engine=parts.engine,
        renderer=parts.renderer,
        environment_factory=parts.environments,
        limits=limits,
        temperature=temperature,
        seed=seed,
    )


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
        parts.runtime.close()


async def _evaluate(parts: Parts, name: str) -> EvaluationResult | None:
    settings = parts.config.evaluation
    if settings is None:
        return None
    parts.observer.phase("evaluation", name)
    setting = _setting(parts, temperature=settings.temperature, seed=parts.config.seed + 1)
    result = await evaluate(
        setting,
        parts.heldout_tasks,
        samples_per_task=settings.samples_per_task,
        observer=parts.observer,
        wake=parts.runtime.wake,
    )
    parts.pass_rates[name] = result.pass_rate
    parts.observer.evaluation(name, result)
    return result


async def _warm_start(parts: Parts) -> None:
    settings = parts.config.warm_start
    if settings is None:
        return
    parts.observer.phase("warm start", f"{settings.steps} supervised steps on {settings.batch_size} transcripts each")
    await run_warm_start(
        WarmStart(
            policy=parts.policy,
            renderer=parts.renderer,
            environment_factory=parts.environments,
            tasks=TaskOrder(parts.train_tasks, seed=parts.config.seed + 2),
            observer=parts.observer,
            settings=settings,
            pack_tokens=parts.config.learner.pack_tokens,
        )
    )


def train_run(config: Config, *, resume: bool, sink: Observer) -> dict[str, Any]:
    """Run the whole job and return its summary (`pass_rate_before`, `pass_rate_warm`, `pass_rate_after`)."""
    return asyncio.run(_train_run(config, resume=resume, observer=sink))


async def _train_run(config: Config, *, resume: bool, observer: Observer) -> dict[str, Any]:
    parts, folder = build(config, observer), RunFolder(Path(config.run))
    run = _RunState(parts, folder)
    async with _serving(parts):
        first_step = run.resume() if resume else await _prepare(parts, run)
        order = TaskOrder(parts.train_tasks, seed=_data_seed(config), position=run.task_position)
        training = Training(
            setting=_setting(parts, temperature=config.rollout.temperature, seed=config.seed),
            learner=parts.learner,
            runtime=parts.runtime,
            tasks=order,
            observer=observer,
            groups_per_step=config.rollout.groups_per_step,
            group_size=config.rollout.group_size,
            extra_groups=config.algorithm.extra_groups,
            max_retries=config.rollout.max_retries,
        )
        observer.phase("training", f"{config.steps} steps of {config.rollout.groups_per_step} groups")
        if resume:
            await publish(training)
        await _train_in_parts(parts, run, training, first_step)
        await _evaluate(parts, "after")
    return run.summary()


async def _prepare(parts: Parts, run: _RunState) -> int:
    await parts.engine.publish(0)
    await _evaluate(parts, "before")
    if parts.config.warm_start is not None:
        await _warm_start(parts)
        await parts.engine.publish(1)
        await _evaluate(parts, "warm")
    parts.learner.version = parts.engine.version
    run.save(next_step=0, position=0)
    return 0


async def _train_in_parts(parts: Parts, run: _RunState, training: Training, first_step: int) -> None:
    """Train, stopping where an evaluation is due; checkpoints are written after steps."""
    config, every = parts.config, parts.config.evaluation.every if parts.config.evaluation else 0

    def after_step(report: StepReport) -> None:
        run.note(report)
        done = report.step + 1
        if done == config.steps or (config.checkpoint_every and done % config.checkpoint_every == 0):
            run.save(next_step=done, position=training.tasks.position)

    step = first_step
    while step < config.steps:
        end = min(config.steps, (step // every + 1) * every) if every else config.steps
        await train(training, first_step=step, num_steps=end, after_step=after_step)
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

    def resume(self) -> int:
        progress = load_checkpoint(latest_checkpoint(self._folder.path), self._parts.learner)
        self._folder.truncate(progress.next_step)
        self._parts.pass_rates.update(progress.pass_rates)
        self.task_position, self._seconds_before = progress.task_position, progress.seconds
        return progress.next_step

    def note(self, report: StepReport) -> None:
        self._mismatch_max = max(self._mismatch_max, report.metrics.get("mismatch_max", 0.0))

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def save(self, *, next_step: int, position: int) -> None:
        learner = self._parts.learner
        progress = Progress(
            next_step=next_step,
            version=learner.version,
            task_position=position,
            num_rewards=learner.running_mean.num_rewards,
            reward_mean=learner.running_mean.mean,
            pass_rates=dict(self._parts.pass_rates),
            seconds=self.seconds,
        )
        save_checkpoint(self._folder.checkpoints, learner, progress)

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
        parts = build(config, observer)
        state = _RunState(parts, RunFolder(Path(config.run)))
        async with _serving(parts):
            await _prepare(parts, state)
        return state.summary()

    return asyncio.run(run())


def eval_run(config: Config, *, checkpoint: Path | None, observer: Observer) -> dict[str, Any]:
    """Evaluate the model as it comes, or a run's newest checkpoint."""

    async def run() -> dict[str, Any]:
        parts = build(config if config.evaluation else replace_evaluation(config), observer)
        if checkpoint is not None:
            load_weights(parts.policy, latest_checkpoint(checkpoint))
        async with _serving(parts):
            await parts.engine.publish(0)
            result = await _evaluate(parts, "after" if checkpoint else "before")
        return asdict(result) if result else {}

    return asyncio.run(run())


def replace_evaluation(config: Config) -> Config:
    """Return the config with default evaluation settings."""
    return config.model_copy(update={"evaluation": EvaluationConfig()})


def rollout_run(config: Config, *, num: int, output: Path, observer: Observer) -> dict[str, Any]:
    """Sample groups of training tasks into a JSONL file, without a learner step."""

    async def run() -> dict[str, Any]:
        parts = build(config, observer)
        async with _serving(parts):
            await parts.engine.publish(0)
            setting = _setting(parts, temperature=config.rollout.temperature, seed=config.seed)
            tasks = TaskOrder(parts.train_tasks, seed=_data_seed(config)).take(num)
            observer.phase("rollout", f"{num} groups of {config.rollout.group_size}")
            ends = await play_all(
                setting,
                tasks,
                samples_per_task=config.rollout.group_size,
                observer=observer,
                wake=parts.runtime.wake,
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
