"""The arms of `bench overlap`: each the real loop over an engine and a learner of its own, in turn step by step.

| who           | waits for              | released by                                |
| ------------- | ---------------------- | ------------------------------------------ |
| an arm        | its turn               | the arm before it, at the end of its step  |
| `side_by_side`| every arm's steps      | the arms, or a worker that failed          |
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from thundersyncrl.bench.tool_world import Workload, tool_worlds
from thundersyncrl.build import Parts, placement_of, setting_of, takes_turns
from thundersyncrl.config import Config, parse_config
from thundersyncrl.environments.isolation import Isolation
from thundersyncrl.environments.task_order import TaskOrder
from thundersyncrl.learner.policy import load_tokenizer
from thundersyncrl.loop import Training, publish, train_step
from thundersyncrl.observe.events import EventBuffer
from thundersyncrl.observe.tee import Tee
from thundersyncrl.records import Task
from thundersyncrl.rollout.renderer import Renderer
from thundersyncrl.runtime.processes import ProcessRuntime, RemoteEngine, RemoteTransport
from thundersyncrl.runtime.trainer import Trainer

GRAPH_TOKENS = 1 << 15
"""Room for the graphs of every live trajectory of the workload, as in `bench learner`: the model is small."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all arms share."""

    workload: Workload
    model: Path
    """Folder of the model."""
    run: Path
    """Folder that configs name; nothing is written there."""
    rhos: tuple[float, ...]
    num_steps: int
    """Of each arm at each rho, all different."""
    repetitions: int
    """How often those steps are measured."""
    num_threads: int
    cores: frozenset[int]
    isolation: Isolation | None
    """None: tools sleep in the controller."""

    def config(self, level: str, placement: str) -> Config:
        """Return the config of an arm."""
        work = self.workload
        return parse_config(
            {
                "run": str(self.run),
                "seed": work.seed,
                "placement": placement,
                "steps": 1 + len(self.rhos) * self.num_steps * self.repetitions,
                "model": {"path": str(self.model), "train": "full", "threads": self.num_threads},
                "learner": {"stream": level, "graph_tokens": GRAPH_TOKENS},
                "rollout": {
                    "groups_per_step": work.num_groups,
                    "group_size": work.group_size,
                    "max_turns": work.max_turns,
                    "max_turn_tokens": work.turn_tokens,
                    "max_action_tokens": work.max_turns * work.turn_tokens,
                    "context_tokens": work.context_tokens,
                    "max_concurrent": work.num_groups * work.group_size,
                    "cache_tokens": work.num_groups * work.group_size * work.context_tokens,
                },
                "evaluation": "none",
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step of one arm."""

    arm: str
    placement: str
    rho: float
    step: int
    """The same number is the same work in every arm."""
    level: str
    """At which level work was done, with auto's reason."""
    metrics: Mapping[str, float]
    """Of the step's report, and CPU seconds as `cpu_<who>_s`: engine, learner, controller, sandboxes, and others, who
    have nothing to do with the benchmark and should have been idle."""


class Arm:
    """An engine and a learner that train at one streaming level; idle between its steps."""

    def __init__(self, level: str, placement: str, plan: Plan, parts: Parts, processes: ProcessRuntime):
        self.level = level
        self._placement = placement
        self._plan = plan
        self._parts = parts
        self.processes = processes
        self._num_done = 0

    @classmethod
    async def start(cls, level: str, placement: str, plan: Plan) -> Self:
        """Start an arm's processes.

        Raises:
            ConfigError: this machine can't place them so.
            WorkerError: one ended.
        """
        config = plan.config(level, placement)
        is_elastic = placement_of(config) == "elastic"
        events = EventBuffer()
        processes = await ProcessRuntime.start(
            config, num_threads=plan.num_threads, elastic=is_elastic, events=events, cores=plan.cores
        )
        parts = Parts(
            config=config,
            renderer=Renderer(load_tokenizer(config.model)),
            environments=tool_worlds(plan.workload, rho=0.0, isolation=plan.isolation),
            engine=RemoteEngine(processes.engine, context_tokens=config.rollout.context_tokens),
            trainer=Trainer(RemoteTransport(processes.learner), takes_turns=takes_turns(config)),
            runtime=processes,
            train_tasks=[],
            heldout_tasks=[],
            observer=Tee(),
            events=events,
        )
        return cls(level, placement, plan, parts, processes)

    async def warm_up(self) -> None:
        """Make the first version live and take one small step, so that what happens once isn't measured."""
        small = replace(self._plan.workload, num_groups=1)
        training = self._training(small.tasks("warm-up", 1), rho=0.0, workload=small)
        await self._parts.trainer.begin_version(0)
        await publish(training)
        await train_step(training, 0)
        self._num_done = 1

    async def step(self, rho: float, number: int) -> Measured:
        """Take step `number` of a rho and return what it took."""
        work = self._plan.workload
        tasks = work.tasks(f"rho={rho}/step={number}", 1)
        training = self._training(tasks, rho=rho, workload=work)
        before = self._cpu_seconds()
        started = time.monotonic()
        report = await train_step(training, self._num_done)
        seconds = time.monotonic() - started
        self._num_done += 1
        cpu = {f"cpu_{who}_s": now - before[who] for who, now in self._cpu_seconds().items()}
        cpu["cpu_others_s"] = max(0.0, cpu.pop("cpu_machine_s") - sum(cpu.values()))
        return Measured(
            arm=self.level,
            placement=self._placement,
            rho=rho,
            step=number,
            level=report.level,
            metrics={**report.metrics, "num_trained": float(report.num_trained), "step_s": seconds, **cpu},
        )

    def _training(self, tasks: Sequence[Task], *, rho: float, workload: Workload) -> Training:
        parts = self._parts
        parts.environments = tool_worlds(workload, rho=rho, isolation=self._plan.isolation)
        return Training(
            setting=setting_of(parts, temperature=1.0, seed=workload.seed),
            trainer=parts.trainer,
            tasks=TaskOrder(tasks, seed=workload.seed),
            observer=parts.observer,
            groups_per_step=workload.num_groups,
            group_size=workload.group_size,
        )

    def _cpu_seconds(self) -> dict[str, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "engine": cpu_seconds(self.processes.engine.pid),
            "learner": cpu_seconds(self.processes.learner.pid),
            "controller": time.process_time(),
            "sandboxes": children.ru_utime + children.ru_stime,
            "machine": machine_seconds(),
        }


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used so far, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def machine_seconds() -> float:
    """Return the CPU seconds that all cores of the machine have worked so far."""
    user, nice, system, _, _, irq, soft_irq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, soft_irq, steal))) / _TICKS_PER_S


def turns(plan: Plan, levels: Sequence[str]) -> Iterable[tuple[str, float, int]]:
    """Yield (level, rho, step) in the order in which they run: the arms take each step one after the other.

    Who is first changes from step to step, so that no arm always runs on a machine that another has warmed or tired.
    """
    count = 0
    for _ in range(plan.repetitions):
        for rho in plan.rhos:
            for number in range(plan.num_steps):
                start = count % len(levels)
                for level in (*levels[start:], *levels[:start]):
                    yield level, rho, number
                count += 1


async def side_by_side(
    levels: Sequence[str], placement: str, plan: Plan, *, heard: Callable[[Measured], None]
) -> list[Measured]:
    """Return every step of the arms of one placement.

    Args:
        levels: streaming levels, one an arm.
        placement: "split" or "elastic".
        plan: what is run.
        heard: told of each step.

    Raises:
        WorkerError: a process ended.
    """
    arms: dict[str, Arm] = {}
    try:
        for level in levels:
            arms[level] = await Arm.start(level, placement, plan)
        body = asyncio.ensure_future(_take_turns(arms, plan, heard))
        servers = [asyncio.ensure_future(arm.processes.serve()) for arm in arms.values()]
        try:
            done, _ = await asyncio.wait({body, *servers}, return_when=asyncio.FIRST_COMPLETED)
            for server in done - {body}:
                server.result()  # raises why a worker ended
            return body.result()
        finally:
            for task in (body, *servers):
                task.cancel()
            await asyncio.gather(body, *servers, return_exceptions=True)
    finally:
        await asyncio.gather(*(arm.processes.close() for arm in arms.values()))


async def _take_turns(arms: Mapping[str, Arm], plan: Plan, heard: Callable[[Measured], None]) -> list[Measured]:
    for arm in arms.values():
        await arm.warm_up()
    steps: list[Measured] = []
    for level, rho, number in turns(plan, list(arms)):
        steps.append(await arms[level].step(rho, number))
        heard(steps[-1])
    return steps
