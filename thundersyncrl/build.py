"""Config to objects: the only factory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from thundersyncrl.algorithms.estimator import Estimator, RewardDomain, get_estimator
from thundersyncrl.algorithms.shaping import kl_to_reference, overlong_penalty, shaped_reward
from thundersyncrl.algorithms.weights import choose_normalizer
from thundersyncrl.config import Config, RolloutConfig
from thundersyncrl.environments.environment import EnvironmentFactory
from thundersyncrl.environments.shell import shell_environments
from thundersyncrl.errors import ConfigError
from thundersyncrl.learner.branch import BranchTokens
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.objective import Objective, RewardShaper, WorkLimits
from thundersyncrl.learner.optimizer import PolicyOptimizer
from thundersyncrl.learner.policy import Policy, load_policy, load_tokenizer
from thundersyncrl.learner.reference import ReferencePolicy
from thundersyncrl.observe.events import EventLog, NoEvents
from thundersyncrl.observe.observer import Observer
from thundersyncrl.records import Task
from thundersyncrl.rollout.embedded import EmbeddedEngine
from thundersyncrl.rollout.engine import Engine
from thundersyncrl.rollout.renderer import Renderer
from thundersyncrl.rollout.setting import Limits, Setting
from thundersyncrl.rollout.versions import VersionedEngine
from thundersyncrl.runtime.inline import InlineRuntime, InlineTransport
from thundersyncrl.runtime.learner_host import LearnerHost
from thundersyncrl.runtime.processes import ProcessRuntime, RemoteEngine, RemoteTransport
from thundersyncrl.runtime.trainer import Trainer
from thundersyncrl.task_sets import task_set


class Runtime(Protocol):
    """Keeps engine and learner at work."""

    async def serve(self) -> None:
        """Return never; raise what ends the run."""
        ...

    async def close(self) -> None:
        """Free everything. Idempotent."""
        ...


@dataclass(slots=True, kw_only=True)
class Parts:
    """Everything that a run is made of."""

    config: Config
    renderer: Renderer
    environments: EnvironmentFactory
    engine: Engine
    trainer: Trainer
    runtime: Runtime
    train_tasks: list[Task]
    heldout_tasks: list[Task]
    observer: Observer
    events: EventLog
    policy: Policy | None = None
    """None where it lives in other processes."""
    pass_rates: dict[str, float] = field(default_factory=dict[str, float])


def objective_of(config: Config, policy: Policy) -> Objective:
    """Return what the config's algorithm maximises."""
    settings = config.algorithm
    estimator = get_estimator(settings.estimator)
    refuse_without_effect(config, estimator)
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


def refuse_without_effect(config: Config, estimator: Estimator) -> None:
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


def build_learner(config: Config, policy: Policy | None = None, *, shares_cores: bool = True) -> Learner:
    """Return the learner of a run, on its policy or on one that is loaded.

    Args:
        shares_cores: whether its work takes time from the engine; `stream = "auto"` weighs that.
    """
    policy = policy or load_policy(config.model, seed=config.seed)[0]
    limits = WorkLimits(
        stream=config.learner.stream,
        pack_tokens=config.learner.pack_tokens,
        graph_tokens=config.learner.graph_tokens,
        early_tokens=config.learner.early_tokens,
        max_open_groups=config.learner.max_open_groups,
        shares_cores=shares_cores,
        max_mismatch=config.learner.max_mismatch,
        max_staleness=config.rollout.max_staleness,
    )
    optimizer = PolicyOptimizer(policy.trained, config.learner, total_steps=config.steps)
    return Learner(policy, objective_of(config, policy), limits, optimizer)


def build_engine(config: Config, prepare: Callable[[Policy], None]) -> EmbeddedEngine | VersionedEngine:
    """Return an engine with a policy of its own, which `prepare` may change before anything reads it.

    It keeps several versions where rollouts may run ahead.
    """
    policy, _ = load_policy(config.model, seed=config.seed)
    prepare(policy)
    settings = config.rollout
    if not settings.max_staleness:
        return engine_of(settings, policy)
    return VersionedEngine(policy, lambda own: engine_of(settings, own), max_concurrent=settings.max_concurrent)


def engine_of(settings: RolloutConfig, policy: Policy) -> EmbeddedEngine:
    return EmbeddedEngine(
        policy,
        context_tokens=settings.context_tokens,
        max_concurrent=settings.max_concurrent,
        cache_tokens=settings.cache_tokens,
    )


def takes_turns(config: Config) -> bool:
    """Return whether the learner makes use of the finished turns of live trajectories."""
    return config.learner.stream in ("turn", "auto")


Placement = Literal["inline", "elastic", "split"]


def placement_of(config: Config) -> Placement:
    """Return where engine and learner live: the config's choice, or the best that this machine has.

    Raises:
        ConfigError: two processes on a GPU, which can't share weights there yet; or rollouts that run ahead where only
            one process can be had.
    """
    has_gpu = torch.cuda.is_available()
    if config.placement is None:
        is_alone = has_gpu or num_threads_of(config) == 1
        if is_alone and config.rollout.max_staleness:
            raise ConfigError(
                f"expected a CPU with several cores for `rollout.max_staleness = {config.rollout.max_staleness}`, got "
                f"{'a GPU' if has_gpu else 'one core'}, where engine and learner take turns in one process; set it to 0"
            )
        return "inline" if is_alone else "elastic"
    if config.placement != "inline" and has_gpu:
        raise ConfigError(
            f'expected `placement = "inline"` on a machine with a GPU, got "{config.placement}": processes share '
            'weights in the CPU\'s memory; set placement = "inline", or hide the GPU with CUDA_VISIBLE_DEVICES=""'
        )
    return config.placement


def num_threads_of(config: Config) -> int:
    return config.model.threads or len(os.sched_getaffinity(0))


async def build(config: Config, observer: Observer, *, placement: Placement, events: EventLog | None = None) -> Parts:
    """Return the parts of a run; everything that can be refused is refused here."""
    events = events or NoEvents()
    train_tasks, heldout_tasks = _tasks(config, observer)
    refuse_without_effect(config, get_estimator(config.algorithm.estimator))
    observer.phase("loading the model", config.model.path)
    if placement == "inline":
        engine, trainer, runtime, policy, tokenizer = _inline(config, events)
    else:
        policy, tokenizer = None, load_tokenizer(config.model)
        processes = await ProcessRuntime.start(
            config, num_threads=num_threads_of(config), elastic=placement == "elastic", events=events
        )
        engine = RemoteEngine(processes.engine, context_tokens=config.rollout.context_tokens)
        transport = RemoteTransport(processes.learner)
        trainer, runtime = Trainer(transport, takes_turns=takes_turns(config)), processes
    return Parts(
        config=config,
        renderer=Renderer(tokenizer),
        environments=shell_environments(config.environment),
        engine=engine,
        trainer=trainer,
        runtime=runtime,
        train_tasks=train_tasks,
        heldout_tasks=heldout_tasks,
        observer=observer,
        events=events,
        policy=policy,
    )


def _inline(config: Config, events: EventLog) -> tuple[EmbeddedEngine, Trainer, InlineRuntime, Policy, Any]:
    torch.set_num_threads(num_threads_of(config))
    policy, tokenizer = load_policy(config.model, seed=config.seed)
    engine, learner = engine_of(config.rollout, policy), build_learner(config, policy)
    host = LearnerHost(learner, pack_tokens=config.learner.pack_tokens)
    runtime = InlineRuntime(engine, host, num_sequences=lambda: engine.stats.num_running + engine.stats.num_waiting)
    engine.on_work, host.events = runtime.wake, events
    engine.log_to(events)
    trainer = Trainer(InlineTransport(runtime, host), takes_turns=takes_turns(config))
    return engine, trainer, runtime, policy, tokenizer


def _tasks(config: Config, observer: Observer) -> tuple[list[Task], list[Task]]:
    def announce(detail: str) -> None:
        observer.phase("making tasks", detail)

    generated = Path(config.run) / "tasks"
    train_tasks = task_set(config, "train", generated, announce)
    heldout_tasks = task_set(config, "heldout", generated, announce) if config.evaluation else []
    return train_tasks, heldout_tasks[: config.evaluation.num_tasks if config.evaluation else 0]


def setting_of(parts: Parts, *, temperature: float, seed: int) -> Setting:
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
        events=parts.events,
    )
