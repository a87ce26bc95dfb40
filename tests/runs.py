"""Small whole runs: the real loop, engine and learner on a random model, in worlds whose reward varies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.toys import tiny_model, toy_tokenizer
from thundersyncrl.ahead import train_ahead
from thundersyncrl.algorithms.estimator import get_estimator
from thundersyncrl.algorithms.weights import Normalizer
from thundersyncrl.config import LearnerConfig, LoraConfig
from thundersyncrl.environments.environment import Observation
from thundersyncrl.environments.task_order import TaskOrder
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.objective import Objective, WorkLimits
from thundersyncrl.learner.optimizer import PolicyOptimizer
from thundersyncrl.learner.policy import Policy, make_policy
from thundersyncrl.loop import Training, publish, train
from thundersyncrl.records import Reward, StepReport, Task, Trajectory
from thundersyncrl.rollout.embedded import EmbeddedEngine
from thundersyncrl.rollout.renderer import Renderer
from thundersyncrl.rollout.setting import Limits, Setting
from thundersyncrl.rollout.versions import VersionedEngine
from thundersyncrl.runtime.checkpoint import Progress, load_checkpoint, save_checkpoint
from thundersyncrl.runtime.inline import InlineRuntime, InlineTransport
from thundersyncrl.runtime.learner_host import LearnerHost
from thundersyncrl.runtime.trainer import Trainer


class VowelWorld:
    """Answers each action with its length; the reward is the share of vowels, so that it varies and can be learnt."""

    system_prompt = "write"

    def __init__(self, task: Task):
        self._task = task
        self._text = ""
        self._num_turns = 0

    async def open(self) -> None:
        await asyncio.sleep(0)

    async def act(self, action_text: str) -> Observation:
        self._text += action_text
        self._num_turns += 1
        await asyncio.sleep(0.0005 * (len(action_text) % 5))  # members end in an order of their own
        return Observation(text=f"{len(action_text)} characters", done=self._num_turns >= 2)

    async def grade(self) -> Reward:
        vowels = sum(c in "aeiou" for c in self._text.lower())
        return Reward(value=vowels / max(len(self._text), 1))

    async def close(self) -> None:
        pass


class Recorder:
    """An observer that keeps what it hears."""

    def __init__(self, *, keeps_trajectories: bool = True) -> None:
        self._keeps_trajectories = keeps_trajectories
        self.trajectories: list[Trajectory] = []
        self.reports: list[StepReport] = []

    def phase(self, name: str, detail: str = "") -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...

    def step(self, report: StepReport) -> None:
        self.reports.append(report)

    def sample(self, trajectory: Trajectory, reward: float | None) -> None:
        if self._keeps_trajectories:
            self.trajectories.append(trajectory)

    def evaluation(self, name: str, result: Any) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One tiny run."""

    stream: str = "trajectory"
    graph_tokens: int = 64
    steps: int = 4
    first_step: int = 0
    seed: int = 0
    data_seed: int = 0
    dtype: torch.dtype = torch.float64
    lora: bool = False
    estimator: str = "grpo"
    temperature: float = 1.0
    extra_groups: int = 0
    learner: LearnerConfig = field(default_factory=lambda: LearnerConfig(learning_rate=1e-3, weight_decay=0.01))
    world: Any = VowelWorld
    checkpoint_after: int | None = None
    folder: Path | None = None
    num_groups: int = 3
    group_size: int = 4
    keeps_trajectories: bool = True
    max_staleness: int = 0
    recorder: Any = None
    """Stands in for the run's own."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    recorder: Recorder
    policy: Policy
    engine: EmbeddedEngine | VersionedEngine
    positions: list[int]
    """In the tasks, as each step's end told it."""

    @property
    def sampled(self) -> dict[str, tuple[int, ...]]:
        """Token ids by trajectory."""
        return {str(t.id): t.token_ids for t in self.recorder.trajectories}

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.policy.trained.values()]


def run_tiny(spec: RunSpec) -> RunResult:
    """Run a tiny training, from a checkpoint in `spec.folder` if `first_step` isn't 0."""
    return asyncio.run(asyncio.wait_for(_run(spec), timeout=240))


def _learner(spec: RunSpec, policy: Policy) -> Learner:
    return Learner(
        policy,
        Objective(
            estimator=get_estimator(spec.estimator), normalizer=Normalizer(name="token"), temperature=spec.temperature
        ),
        WorkLimits(
            stream=spec.stream,
            pack_tokens=128,
            graph_tokens=spec.graph_tokens,
            early_tokens=1,
            max_staleness=spec.max_staleness,
        ),
        PolicyOptimizer(policy.trained, spec.learner, total_steps=20),
    )


def _engine(policy: Policy, max_staleness: int) -> EmbeddedEngine | VersionedEngine:
    def make(own: Policy) -> EmbeddedEngine:
        return EmbeddedEngine(own, context_tokens=256, max_concurrent=8, cache_tokens=8192)

    return VersionedEngine(policy, make, max_concurrent=8) if max_staleness else make(policy)


def _num_sequences(engine: EmbeddedEngine | VersionedEngine) -> int:
    if isinstance(engine, VersionedEngine):
        return 1  # no more than it ever was: the learner goes first
    return engine.stats.num_running + engine.stats.num_waiting


def _setting(spec: RunSpec, engine: EmbeddedEngine | VersionedEngine, tokenizer: Any) -> Setting:
    limits = Limits(
        max_turns=3,
        max_turn_tokens=8,
        max_action_tokens=20,
        context_tokens=256,
        trajectory_limit_s=60.0,
        grade_limit_s=30.0,
    )
    return Setting(
        engine=engine,
        renderer=Renderer(tokenizer),
        environment_factory=spec.world,
        limits=limits,
        temperature=spec.temperature,
        seed=spec.seed,
    )


async def _run(spec: RunSpec) -> RunResult:
    tokenizer = toy_tokenizer()
    lora = LoraConfig(rank=4) if spec.lora else None
    policy = make_policy(
        tiny_model("qwen3", vocab_size=len(tokenizer), seed=7).to(spec.dtype),
        dtype=spec.dtype,
        lora=lora,
        seed=spec.seed,
    )
    engine = _engine(policy, spec.max_staleness)
    learner = _learner(spec, policy)
    recorder = spec.recorder or Recorder(keeps_trajectories=spec.keeps_trajectories)
    host = LearnerHost(learner, pack_tokens=128)
    runtime = InlineRuntime(engine, host, num_sequences=lambda: _num_sequences(engine))
    engine.on_work = runtime.wake
    tasks = [Task(id=f"t{i}", instruction=f"say {i}" * (i + 1)) for i in range(5)]
    order = TaskOrder(tasks, seed=spec.data_seed)
    if spec.first_step:
        assert spec.folder is not None
        progress = load_checkpoint(spec.folder / f"step-{spec.first_step:06d}", learner)
        order.position = progress.task_position
    trainer = Trainer(InlineTransport(runtime, host), takes_turns=spec.stream in ("turn", "auto"))
    await trainer.begin_version(learner.version)
    training = Training(
        setting=_setting(spec, engine, tokenizer),
        trainer=trainer,
        tasks=order,
        observer=recorder,
        groups_per_step=spec.num_groups,
        group_size=spec.group_size,
        extra_groups=spec.extra_groups,
        max_staleness=spec.max_staleness,
    )
    positions: list[int] = []

    async def after_step(report: StepReport, position: int) -> None:
        positions.append(position)
        if spec.folder is not None and report.step + 1 == spec.checkpoint_after:
            save_checkpoint(spec.folder, learner, _progress(report, position, learner))

    async def body() -> None:
        await publish(training)
        run_steps = train_ahead if spec.max_staleness else train
        await run_steps(training, first_step=spec.first_step, num_steps=spec.steps, after_step=after_step)

    tasks_ = {asyncio.ensure_future(runtime.serve()), asyncio.ensure_future(body())}
    try:
        done, _ = await asyncio.wait(tasks_, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks_:
            task.cancel()
        await asyncio.gather(*tasks_, return_exceptions=True)
        await engine.close()
        await runtime.close()
    return RunResult(recorder=recorder, policy=policy, engine=engine, positions=positions)


def _progress(report: StepReport, position: int, learner: Learner) -> Progress:
    return Progress(
        next_step=report.step + 1,
        version=learner.version,
        task_position=position,
        num_rewards=learner.running_mean.num_rewards,
        reward_mean=learner.running_mean.mean,
        pass_rates={},
        seconds=0.0,
    )
