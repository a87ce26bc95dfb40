"""The shell environment: an agent works on a Harbor task with bash commands in a sandbox, a verifier judges the world.

| who     | waits for                    | limit                              | released by             |
| ------- | ---------------------------- | ---------------------------------- | ----------------------- |
| `act`   | room for a command           | `SLOT_LIMIT_S`                     | another command's end   |
| `act`   | its command                  | `environment.command_limit_s`      | the command, or a limit |
| `grade` | room for a command           | `SLOT_LIMIT_S`                     | another command's end   |
| `grade` | the verifier                 | `environment.verifier_limit_s`     | the verifier, or a limit |
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from thundersyncrl.config import EnvironmentConfig
from thundersyncrl.environments import isolation as kernel
from thundersyncrl.environments import storage
from thundersyncrl.environments.command import DONE, Command, Finish, Malformed, parse_action
from thundersyncrl.environments.environment import Environment, EnvironmentFactory, Observation
from thundersyncrl.environments.harbor import read_task
from thundersyncrl.environments.isolation import Isolation
from thundersyncrl.environments.limits import MEGABYTE, Limits
from thundersyncrl.environments.process import in_thread
from thundersyncrl.environments.sandbox import GRADING_ROOM_BYTES, CommandResult, Mount, Sandbox
from thundersyncrl.environments.verdict import read_reward
from thundersyncrl.errors import (
    EnvironmentFailure,
    PhaseError,
    TaskError,
    TimeLimitError,
    ToolError,
    VerifierError,
)
from thundersyncrl.records import Reward, Task

SLOT_LIMIT_S = 600.0
"""How long a command may wait for others to end, before it counts as a failure of the environment."""

_SHOWN_OF_FAILURE = 400


def observation_text(result: CommandResult, *, limits: Limits, num_ignored: int = 0) -> str:
    r"""Return what the agent is shown of a command: its output, then what it couldn't tell from that.

    Example:
        >>> seen = dict(output="", limit="", was_killed=False, duration_s=0.1, num_bytes=0, num_bytes_dropped=0)
        >>> result = CommandResult(exit_code=2, **seen)
        >>> observation_text(result, limits=Limits.from_settings(EnvironmentConfig()))
        '(no output)\n[exit code 2]'
    """
    lines = [result.output.rstrip("\n") or "(no output)"]
    if result.limit:
        lines.append(f"[{_limit_text(result, limits)}]")
    if result.exit_code and not result.was_killed:
        lines.append(f"[exit code {result.exit_code}]")
    if num_ignored:
        lines.append("[only the first block was run]")
    return "\n".join(lines)


def _limit_text(result: CommandResult, limits: Limits) -> str:
    meanings = {
        "wall": f"killed after {limits.wall_s:g} s",
        "cpu": f"killed after {limits.cpu_s:g} s of CPU time",
        "memory": f"killed: more than {limits.memory_bytes // MEGABYTE} MB of memory",
        "processes": f"no more than {limits.max_processes} processes",
        "disk": f"disk full: {limits.disk_bytes // MEGABYTE} MB",
        "output": f"killed after {limits.max_output_bytes // MEGABYTE} MB of output",
    }
    return meanings[result.limit]


class ShellEnvironment:
    """One sandboxed world for one trajectory of a Harbor task.

    Args:
        task: with the folder that `harbor.load_task` read.
        settings: limits; a task's own smaller one wins.
        semaphore: bounds the commands that run at once, over all environments that share it.
        isolation: how sandboxes are made; None takes what this machine gives.

    Raises:
        TaskError: the task has no folder, or its folder can't be used.
        ConfigError: no sandbox can be made here.
    """

    def __init__(
        self,
        task: Task,
        settings: EnvironmentConfig,
        semaphore: asyncio.Semaphore,
        *,
        isolation: Isolation | None = None,
    ) -> None:
        if task.folder is None:
            raise TaskError(f"expected a task with a Harbor folder, got {task.id!r} without; use `load_tasks`")
        self._task = task
        self._harbor = read_task(task.folder)
        self._semaphore = semaphore
        self._isolation = kernel.detect() if isolation is None else isolation
        self._limits = Limits.from_settings(settings).at_most(
            wall_s=self._harbor.agent_limit_s,
            memory_bytes=self._harbor.memory_bytes,
            disk_bytes=self._harbor.disk_bytes,
        )
        self._verifier_limits = self._limits.for_verifier(min(settings.verifier_limit_s, self._harbor.verifier_limit_s))
        self._sandbox = Sandbox(
            self._isolation,
            limits=self._limits,
            workdir=self._harbor.workdir,
            folders=self._harbor.top_folders,
            variables=self._harbor.variables,
        )
        self._phase = "new"

    @property
    def system_prompt(self) -> str:
        """How the agent is told to act; short, since every trajectory of every step reads it."""
        return (
            f"You use a Linux shell in {self._harbor.workdir}. Reply with one ```bash block; you then see its output. "
            f"When that block finishes the task, write {DONE} below it."
        )

    async def open(self) -> None:
        """Build the world.

        Raises:
            EnvironmentFailure: it can't be built, or the task's files don't fit on its disk.
        """
        self._expect("new")
        self._phase = "open"
        self._sandbox.open()
        try:
            await in_thread(self._copy_files)
        except OSError as error:
            raise EnvironmentFailure(
                f"expected to copy the task's files to a disk of {self._limits.disk_bytes} bytes, got {error} "
                f"({self._task.id}); correct the task, or raise `environment.disk_mb` if they don't fit"
            ) from error

    def _copy_files(self) -> None:
        for folder in self._harbor.made_folders:
            self._sandbox.place(folder).mkdir(parents=True, exist_ok=True)
        for copy in self._harbor.copies:
            target = self._sandbox.place(copy.target)
            if target.is_dir() and not copy.source.is_dir():
                target /= copy.source.name
            storage.copy_in(copy.source, target, root=self._sandbox.place("/"))
        for folder in self._harbor.top_folders:
            self._sandbox.give_to_agent(self._sandbox.place(folder))

    async def act(self, action_text: str) -> Observation:
        """Carry out one reply of the model; a command that fails or is killed is an observation.

        Raises:
            EnvironmentFailure: the sandbox could not be built.
            TimeLimitError: no room for a command within `SLOT_LIMIT_S`.
        """
        self._expect("open")
        match parse_action(action_text):
            case Finish():
                return Observation(text="", done=True)
            case Malformed(reason):
                return Observation(text=reason, done=False, is_malformed=True, metrics={"num_malformed": 1.0})
            case Command() as command:
                return await self._run(command)

    async def _run(self, command: Command) -> Observation:
        result = await self._in_slot(command.text, self._limits)
        metrics = {"tool_s": result.duration_s, "exit_code": float(result.exit_code), "num_commands": 1.0}
        if result.limit:
            metrics[f"num_{result.limit}_limits"] = 1.0
        text = observation_text(result, limits=self._limits, num_ignored=command.num_ignored)
        return Observation(text="" if command.is_last else text, done=command.is_last, metrics=metrics)

    async def _in_slot(
        self,
        command: str,
        limits: Limits,
        *,
        mounts: tuple[Mount, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> CommandResult:
        try:
            async with asyncio.timeout(SLOT_LIMIT_S):
                await self._semaphore.acquire()
        except TimeoutError:
            raise TimeLimitError(
                f"expected room for a command within {SLOT_LIMIT_S:g} s, got none ({self._task.id}); "
                "raise `environment.max_open` or lower `environment.command_limit_s`"
            ) from None
        try:
            return await self._sandbox.run(command, limits=limits, mounts=mounts, variables=variables)
        finally:
            self._semaphore.release()

    async def solve(self) -> None:
        """Run the task's own solution, as an agent would.

        Raises:
            TaskError: the task has no `solution/solve.sh`.
            ToolError: the solution fails.
        """
        self._expect("open")
        if not (self._harbor.solution / "solve.sh").is_file():
            raise TaskError(f"expected `solution/solve.sh` to run the oracle, got none ({self._harbor.folder})")
        folder = await in_thread(lambda: self._give_folder("oracle", self._harbor.solution, "solution"))
        result = await self._in_slot(
            "bash /solution/solve.sh",
            self._verifier_limits,
            mounts=(Mount(source=folder / "solution", target="/solution"),),
            variables=self._harbor.solution_variables,
        )
        if result.exit_code or result.was_killed:
            raise ToolError(f"expected the oracle to succeed, got {_failure(result)} ({self._task.id})")

    def _give_folder(self, name: str, source: Path, inner: str) -> Path:
        """Return a new folder that holds a copy of `source`; what is mounted can't be changed by a command."""
        size_bytes = storage.used_bytes(source) + GRADING_ROOM_BYTES
        folder = self._sandbox.new_side_folder(name, size_bytes=size_bytes)
        storage.copy_in(source, folder / inner, root=folder)
        for writable in ("logs", "home"):
            (folder / writable).mkdir()
        self._sandbox.give_to_agent(folder)
        return folder

    async def grade(self) -> Reward:
        """Run the verifier on the world as it stands: its files appear only now, and nothing else still runs.

        A verifier that runs the agent's own programs must write its reward after they have ended.

        Raises:
            VerifierError: no verdict, or one that isn't a finite number.
            TimeLimitError: the verifier's wall time, or no room for a command.
            EnvironmentFailure: the sandbox could not be built.
        """
        self._expect("open")
        self._phase = "graded"
        try:
            folder = await in_thread(lambda: self._give_folder("verifier", self._harbor.tests, "tests"))
            self._sandbox.make_room_for_grading()
        except OSError as error:
            raise EnvironmentFailure(f"expected to set up the verifier, got {error} ({self._task.id})") from error
        result = await self._in_slot(
            "bash /tests/test.sh",
            self._verifier_limits,
            mounts=(
                Mount(source=folder / "tests", target="/tests"),
                Mount(source=folder / "logs", target="/logs/verifier", is_writable=True),
                Mount(source=folder / "home", target="/logs/home", is_writable=True),
            ),
            # The agent owns its home and could have left settings there that change what programs do.
            variables={"HOME": "/logs/home", "PYTHONNOUSERSITE": "1", **self._harbor.verifier_variables},
        )
        if result.timed_out:
            raise TimeLimitError(
                f"expected the verifier to end within {self._verifier_limits.wall_s:g} s, got no end "
                f"({self._task.id}); raise `environment.verifier_limit_s` or the task's `verifier.timeout_sec`"
            )
        if result.was_killed:
            raise VerifierError(f"expected a verdict, got {_failure(result)} ({self._task.id})")
        try:
            return read_reward(folder / "logs")
        except VerifierError as error:
            raise VerifierError(f"{error} ({self._task.id}; it ended with {_failure(result)})") from None

    async def close(self) -> None:
        """Kill every process and remove every file of this world. Idempotent; never raises."""
        self._phase = "closed"
        await self._sandbox.stop()
        await in_thread(self._sandbox.close)

    def _expect(self, phase: str) -> None:
        if self._phase != phase:
            raise PhaseError(
                f"expected an environment that is {phase}, got one that is {self._phase} ({self._task.id}); "
                "open it once, act, grade once, close it"
            )


def _failure(result: CommandResult) -> str:
    what = f"limit {result.limit!r}" if result.limit else f"exit code {result.exit_code}"
    shown = result.output.strip()[-_SHOWN_OF_FAILURE:]
    return f"{what} and output {shown!r}" if shown else f"{what} and no output"


def shell_environments(settings: EnvironmentConfig) -> EnvironmentFactory:
    """Return a factory of shell environments that share a bound on commands at once.

    Raises:
        ConfigError: no sandbox can be made on this machine; with the reason.
    """
    isolation = kernel.detect()
    semaphore = asyncio.Semaphore(settings.max_open)

    def make(task: Task) -> Environment:
        return ShellEnvironment(task, settings, semaphore, isolation=isolation)

    return make


async def run_oracle(task: Task, settings: EnvironmentConfig) -> Reward:
    """Return the verdict on the task's own solution.

    Raises:
        TaskError: the task has no solution.
        RolloutError: as `ShellEnvironment`'s methods.
    """
    return await _graded(task, settings, solve=True)


async def run_nothing(task: Task, settings: EnvironmentConfig) -> Reward:
    """Return the verdict on an untouched world; raises as `run_oracle`."""
    return await _graded(task, settings, solve=False)


async def _graded(task: Task, settings: EnvironmentConfig, *, solve: bool) -> Reward:
    environment = ShellEnvironment(task, settings, asyncio.Semaphore(1))
    try:
        await environment.open()
        if solve:
            await environment.solve()
        return await environment.grade()
    finally:
        await environment.close()


def check_sandbox() -> str:
    """Return a report of which limits the kernel enforces here.

    Raises:
        ConfigError: no sandbox can be made on this machine; with the reason.
    """
    return kernel.detect().describe()
