"""The arms of `bench overlap`: each the real loop over an engine and a learner of its own, in turn step by step.

An asynchronous arm can't pause between steps, so it takes all steps of a rho in one go: one before them that fills the
pipeline, and as many after them as rollouts run ahead, so that every measured step has later rollouts beside it.

| who           | waits for              | released by                                |
| ------------- | ---------------------- | ------------------------------------------ |
| an arm        | its turn               | the arm before it, at the end of its steps |
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

from thundersyncrl.ahead import train_ahead
from thundersyncrl.bench.tool_world import Workload, tool_worlds
from thundersyncrl.build import Parts, placement_of, setting_of, takes_turns
from thundersyncrl.config import Config, parse_config
from thundersyncrl.environments.isolation import Isolation
from thundersyncrl.learner.policy import load_tokenizer
from thundersyncrl.loop import Training, publish, train_step
from thundersyncrl.observe.events import EventBuffer
from thundersyncrl.observe.tee import Tee
from thundersyncrl.records import StepReport, Task
from thundersyncrl.rollout.renderer import Renderer
from thundersyncrl.runtime.processes import ProcessRuntime, RemoteEngine, RemoteTransport
from thundersyncrl.runtime.trainer import Trainer

ASYNCHRONOUS = {f"async{k}": k for k in (1, 2, 3, 4)}
"""Arms whose rollouts run ahead, and by how many steps."""
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

    def config(self, name: str, placement: str) -> Config:
        """Return the config of an arm."""
        work, max_staleness = self.workload, ASYNCHRONOUS.get(name, 0)
        return parse_config(
            {
                "run": str(self.run),
                "seed": work.seed,
                "placement": placement,
                "steps": 1 + len(self.rhos) * self.num_steps * self.repetitions,
                "model": {"path": str(self.model), "train": "full", "threads": self.num_threads},
                "learner": {"stream": "auto" if max_staleness else name, "graph_tokens": GRAPH_TOKENS},
                "rollout": {
                    "groups_per_step": work.num_groups,
                    "group_size": work.group_size,
                    "max_turns": work.max_turns,
                    "max_turn_tokens": work.turn_tokens,
                    "max_action_tokens": work.max_turns * work.turn_tokens,
                    "context_tokens": work.context_tokens,
                    "max_concurrent": work.num_groups * work.group_size,
                    "cache_tokens": work.num_groups * work.group_size * work.context_tokens,
                    "max_staleness": max_staleness,
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
    """An engine and a learner that train at one streaming level, or ahead; idle between its turns."""

    def __init__(self, name: str, placement: str, plan: Plan, parts: Parts, processes: ProcessRuntime):
        self.name = name
        self._placement = placement
        self._plan = plan
        self._parts = parts
        self.processes = processes
        self._num_done = 0

    @classmethod
    async def start(cls, name: str, placement: str, plan: Plan) -> Self:
        """Start an arm's processes.

        Raises:
            ConfigError: this machine can't place them so.
            WorkerError: one ended.
        """
        config = plan.config(name, placement)
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
        return cls(name, placement, plan, parts, processes)

    async def warm_up(self) -> None:
        """Make the first version live and take one small step, so that what happens once isn't measured."""
        small = replace(self._plan.workload, num_groups=1)
        training = self._training(_InOrder(small.tasks("warm-up", 1)), rho=0.0, workload=small)
        await self._parts.trainer.begin_version(0)
        await publish(training)
        await train_step(training, 0)
        self._num_done = 1

    async def take_turn(self, rho: float, number: int) -> list[Measured]:
        """Take step `number` of a rho, or in the turn of step 0 all of them where rollouts run ahead."""
        if self.name not in ASYNCHRONOUS:
            return [await self._step(rho, number)]
        return await self._steps_ahead(rho) if number == 0 else []

    async def _step(self, rho: float, number: int) -> Measured:
        work = self._plan.workload
        training = self._training(_InOrder(work.tasks(_named(rho, number), 1)), rho=rho, workload=work)
        clock = _Clock(self._cpu_seconds)
        report = await train_step(training, self._num_done)
        self._num_done += 1
        return self._measured(rho, number, report, clock.lap())

    async def _steps_ahead(self, rho: float) -> list[Measured]:
        """Take every step of a rho, with one before and some after them that aren't measured."""
        work, num, found = self._plan.workload, self._plan.num_steps, list[Measured]()
        extra = ASYNCHRONOUS[self.name]
        names = ["fill", *range(num), *(f"drain-{i}" for i in range(extra))]
        training = self._training(
            _InOrder([task for name in names for task in work.tasks(_named(rho, name), 1)]), rho=rho, workload=work
        )
        clock, first = _Clock(self._cpu_seconds), self._num_done

        async def after_step(report: StepReport, position: int) -> None:
            number, lap = report.step - first - 1, clock.lap()
            if 0 <= number < num:
                found.append(self._measured(rho, number, report, lap))

        await train_ahead(training, first_step=first, num_steps=first + len(names), after_step=after_step)
        self._num_done += len(names)
        return found

    def _measured(self, rho: float, number: int, report: StepReport, lap: Mapping[str, float]) -> Measured:
        metrics = {**report.metrics, "num_trained": float(report.num_trained), **lap}
        return Measured(
            arm=self.name, placement=self._placement, rho=rho, step=number, level=report.level, metrics=metrics
        )

    def _training(self, tasks: _InOrder, *, rho: float, workload: Workload) -> Training:
        parts = self._parts
        parts.environments = tool_worlds(workload, rho=rho, isolation=self._plan.isolation)
        return Training(
            setting=setting_of(parts, temperature=1.0, seed=workload.seed),
            trainer=parts.trainer,
            tasks=tasks,
            observer=parts.observer,
            groups_per_step=workload.num_groups,
            group_size=workload.group_size,
            max_staleness=ASYNCHRONOUS.get(self.name, 0),
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


def _named(rho: float, step: int | str) -> str:
    return f"rho={rho}/step={step}"


class _InOrder:
    """Gives tasks in the order in which they are listed."""

    def __init__(self, tasks: Sequence[Task]):
        self.position = 0
        self._tasks = tasks

    def take(self, num: int) -> list[Task]:
        start, self.position = self.position, self.position + num
        return list(self._tasks[start : self.position])


class _Clock:
    """Measures laps: wall time, and CPU seconds by who used them."""

    def __init__(self, cpu_seconds: Callable[[], Mapping[str, float]]):
        self._cpu_seconds = cpu_seconds
        self._cpu, self._started = cpu_seconds(), time.monotonic()

    def lap(self) -> dict[str, float]:
        """Return `step_s` and `cpu_<who>_s` since the last lap."""
        cpu, now = self._cpu_seconds(), time.monotonic()
        used = {f"cpu_{who}_s": seconds - self._cpu[who] for who, seconds in cpu.items()}
        used["cpu_others_s"] = max(0.0, used.pop("cpu_machine_s") - sum(used.values()))
        used["step_s"] = now - self._started
        self._cpu, self._started = cpu, now
        return used


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
        levels: names of arms: streaming levels, or those of `ASYNCHRONOUS`.
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
    for name, rho, number in turns(plan, list(arms)):
        for step in await arms[name].take_turn(rho, number):
            steps.append(step)
            heard(step)
    return steps
