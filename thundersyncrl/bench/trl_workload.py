"""What both arms of `bench trl` do in a step: their tasks, scripts and sizes, and the record of what a step took."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from thundersyncrl.bench.overlap_arms import Plan
from thundersyncrl.bench.tool_world import Script, ToolWorld, Workload, draw_script
from thundersyncrl.config import Config, EnvironmentConfig
from thundersyncrl.environments.environment import Environment, EnvironmentFactory
from thundersyncrl.environments.limits import Limits
from thundersyncrl.errors import ContractError
from thundersyncrl.records import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What both arms share in one of the workloads."""

    name: str
    work: Workload
    """With the same number of turns for all."""
    folder: Path
    """Has the model, in `model`; TRL may write into it."""
    num_steps: int
    """Measured steps; one more warms up."""
    num_threads: int
    """Of TRL's process, and of engine and learner together."""
    micro_batch: int
    """Trajectories of a forward and backward of TRL; divides those of a step."""

    @property
    def num_turns(self) -> int:
        return self.work.max_turns

    @property
    def num_trajectories(self) -> int:
        """Of a step."""
        return self.work.num_groups * self.work.group_size

    def tasks(self, step: int) -> list[Task]:
        """Return a step's tasks, one a group."""
        return self.work.tasks(f"{self.name}/step={step}", 1)

    def tool_seconds(self, step: int) -> list[tuple[float, ...]]:
        """Return the seconds of each trajectory's calls, turn by turn; the last turn has none."""
        members = range(self.work.group_size)
        return [script_of(self.work, task.id, m).tools_s[:-1] for task in self.tasks(step) for m in members]

    def config(self) -> Config:
        """Return the config of our arm: everything that isn't named here is the default of `train`."""
        plan = Plan(
            workload=self.work,
            model=self.folder / "model",
            run=self.folder / "run",
            rhos=(0.0,),
            num_steps=self.num_steps,
            repetitions=1,
            num_threads=self.num_threads,
            cores=frozenset(os.sched_getaffinity(0)),
            isolation=None,
        )
        return plan.config("auto", "elastic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one arm."""

    arm: str
    workload: str
    number: int
    """The same number is the same work in both arms; 0 warmed up."""
    seconds: float
    num_trajectories: int
    """All of them were trained."""
    num_tokens: int
    """Sampled, all of them trained."""
    turns: float
    """Of a trajectory, on average."""
    tool_s: float
    """Seconds of all tool calls, one after the other."""
    tools_at_once_s: float
    """Seconds of all tool calls, if all trajectories made each turn's call at the same moment."""


def script_of(work: Workload, task_id: str, member: int) -> Script:
    """Return what a member's environment does: only calls between turns take time, neither the end nor the reward."""
    script = draw_script(work, rho=0.0, task_id=task_id, member=member)
    return replace(script, tools_s=(*script.tools_s[:-1], 0.0), verifier_s=0.0)


def worlds(work: Workload) -> EnvironmentFactory:
    """Return a factory of our arm's environments; a group's members get their scripts in the order of their start."""
    limits = Limits.from_settings(EnvironmentConfig())
    opened: Counter[str] = Counter()

    def make(task: Task) -> Environment:
        member = opened[task.id] % work.group_size
        opened[task.id] += 1
        return ToolWorld(script_of(work, task.id, member), None, limits)

    return make


def measured(
    setup: Setup, arm: str, number: int, *, seconds: float, num_trained: int, num_tokens: int, turns: float
) -> Step:
    """Return a step's record.

    Raises:
        ContractError: the arm did other work than it was given.
    """
    if num_trained != setup.num_trajectories or abs(turns - setup.num_turns) > 1e-3:
        raise ContractError(
            f"expected {setup.num_trajectories} trained trajectories of {setup.num_turns} turns in step {number} of "
            f"{arm}, got {num_trained} of {turns:g}; the arms can't be compared so"
        )
    calls = setup.tool_seconds(number)
    return Step(
        arm=arm,
        workload=setup.name,
        number=number,
        seconds=seconds,
        num_trajectories=num_trained,
        num_tokens=num_tokens,
        turns=turns,
        tool_s=sum(map(sum, calls), 0.0),
        tools_at_once_s=sum((max(of_turn) for of_turn in zip(*calls, strict=True)), 0.0),
    )
