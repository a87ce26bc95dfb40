"""One single-use world: private files that last from command to command, and commands that can't reach anything else.

Each command runs in a fresh bubblewrap: no network, an own process tree, the system's programs read-only, a
generated
/etc, a clean environment, a user without rights. Only the world's own folders can be written.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from thundersyncrl.environments import cgroup, storage
from thundersyncrl.environments.cgroup import ControlGroup
from thundersyncrl.environments.isolation import HOME, SEARCH_PATH, Isolation
from thundersyncrl.environments.limits import Limits
from thundersyncrl.environments.output import BoundedOutput
from thundersyncrl.environments.process import DEATH_LIMIT_S, Ended, ProcessTree
from thundersyncrl.errors import EnvironmentFailure, PhaseError

WRITABLE = ("/app", "/tmp", "/home")
"""Folders of every world that may be written."""

RESERVED = frozenset(
    f"/{name}"
    for name in (
        *("bin", "sbin", "lib", "lib32", "lib64", "usr", "etc", "proc", "sys", "dev", "boot"),
        *("tests", "logs", "solution", "shm"),
    )
)
"""Top folders that a task can't have for its own files."""

GRADING_ROOM_BYTES = 16 << 20
"""Disk for a verifier beyond what the agent may use, so that a full disk doesn't prevent a verdict."""

_EXTRA_PROCESSES = 8  # bubblewrap itself, the first process inside and our launcher are counted too
_SIGNALLED_LIMITS = {128 + signal.SIGXCPU: "cpu", 128 + signal.SIGXFSZ: "disk"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command did."""

    output: str
    """Standard output and standard error as they came, decoded and cut in the middle."""
    exit_code: int
    limit: str
    """The limit that it met: "wall", "cpu", "memory", "processes", "disk", "output"; empty for none."""
    was_killed: bool
    """True when the whole tree was killed at the limit; at others a process was killed, or refused something."""
    duration_s: float
    num_bytes: int
    """Bytes that it printed."""
    num_bytes_dropped: int
    """Bytes that were never kept in memory."""

    @property
    def timed_out(self) -> bool:
        return self.limit == "wall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder of ours that one command sees."""

    source: Path
    target: str
    is_writable: bool = False


class Sandbox:
    """A world. `open` it, `run` commands one after the other, `close` it.

    Args:
        isolation: how sandboxes are made on this machine.
        limits: memory and disk of the world.
        workdir: where commands start; below a folder that may be written.
        folders: further top folders that may be written, such as "/data".
        variables: environment of every command, beyond PATH, HOME, LANG, TERM and USER.
    """

    def __init__(
        self,
        isolation: Isolation,
        *,
        limits: Limits,
        workdir: str = "/app",
        folders: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._isolation = isolation
        self._limits = limits
        self._workdir = workdir
        self._folders = tuple(dict.fromkeys((*WRITABLE, *folders)))
        self._variables = {
            "PATH": SEARCH_PATH,
            "HOME": HOME,
            "USER": "agent",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **(variables or {}),
        }
        self._group_name = "not opened"
        self._side_folders: list[Path] = []
        self._was_opened = self._is_open = self._is_running = False

    def open(self) -> None:
        """Make the world's folders.

        Raises:
            EnvironmentFailure: they can't be made.
            PhaseError: opened before.
        """
        if self._was_opened:
            raise PhaseError("expected a fresh sandbox, got one that was opened before; make a new one for each world")
        self._was_opened = True
        store = storage.current()
        self._world = store.new_world()
        self._group_name = f"{store.name}-{self._world.name}"
        try:
            self._files = self.new_side_folder("files", size_bytes=self._limits.disk_bytes)
            self._group = ControlGroup(
                self._isolation.controllers,
                name=self._group_name,
                # Files on a tmpfs are memory to the kernel: they must not eat up what the processes may use.
                memory_bytes=self._limits.memory_bytes + self._limits.disk_bytes + GRADING_ROOM_BYTES,
                max_processes=self._limits.max_processes + _EXTRA_PROCESSES,
            )
            self._make_folders()
        except OSError as error:
            storage.remove_tree(self._world)
            cgroup.remove_abandoned(self._isolation.controllers.parents.values(), self._group_name)
            raise EnvironmentFailure(f"expected to make a world below {self._world}, got {error}") from error
        self._is_open = True

    def _mount(self, folder: Path, size_bytes: int, *, remount: bool = False) -> None:
        if not storage.mount_tmpfs(folder, size_bytes=size_bytes, remount=remount):
            raise OSError(f"a tmpfs of {size_bytes} bytes could not be mounted at {folder}")

    def _make_folders(self) -> None:
        for name in (*self._folders, HOME, self._workdir, "/shm"):
            self.place(name).mkdir(parents=True, exist_ok=True)
        self.place("/tmp").chmod(0o1777)
        self.place("/shm").chmod(0o1777)
        self.give_to_agent(self._files)

    @property
    def workdir(self) -> str:
        return self._workdir

    @property
    def limits(self) -> Limits:
        return self._limits

    def place(self, path: str) -> Path:
        """Return where a path of the world lies outside; only safe to write to before the first command has run."""
        return self._files / PurePosixPath(path).relative_to("/")

    def give_to_agent(self, folder: Path) -> None:
        """Make the world's user the owner of everything below `folder`."""
        if self._isolation.changes_user:
            storage.give_to(folder, self._isolation.outer_uid)

    def new_side_folder(self, name: str, *, size_bytes: int) -> Path:
        """Return an empty folder beside the world's files, which no command sees unless it is mounted."""
        folder = self._world / name
        folder.mkdir()
        folder.chmod(0o711)
        self._side_folders.append(folder)
        if self._isolation.has_tmpfs:
            self._mount(folder, size_bytes)
        return folder

    def make_room_for_grading(self) -> None:
        """Give the world's disk `GRADING_ROOM_BYTES` more."""
        if self._isolation.has_tmpfs:
            self._mount(self._files, self._limits.disk_bytes + GRADING_ROOM_BYTES, remount=True)

    async def run(
        self,
        command: str,
        *,
        limits: Limits,
        mounts: Sequence[Mount] = (),
        variables: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Return what a bash command did. Files last; the working directory, variables and processes don't.

        Raises:
            EnvironmentFailure: the sandbox itself could not be built or did not end.
            PhaseError: the world isn't open, or a command is running.
        """
        if not self._is_open or self._is_running:
            state = "one that runs a command already" if self._is_open else "one that isn't open"
            raise PhaseError(f"expected an idle open sandbox, got {state} ({self._group_name})")
        output = BoundedOutput(limits.output_chars)
        arguments = [*self._mount_arguments(mounts), *self._variable_arguments(variables or {})]
        arguments += ["--chdir", "/", "--", "/bin/bash", "-c", self._first_process(limits), self._workdir]
        before = self._count()
        self._is_running, self._ended = True, asyncio.Event()
        try:
            tree = ProcessTree(
                self._isolation.launcher(),
                lambda fd: [*self._isolation.bwrap_arguments(status_fd=fd), *arguments, _encodable(command)],
                group=self._group,
                output=output,
            )
            self._kill_running = tree.kill
            ended = await tree.wait(
                wall_s=limits.wall_s,
                max_output_bytes=limits.max_output_bytes,
                check=lambda: self._check(limits, before[0]),
            )
            return self._result(ended, output, before)
        except OSError as error:
            raise EnvironmentFailure(f"expected to start a sandbox, got {error} ({self._group_name})") from error
        finally:
            self._is_running = False
            self._ended.set()

    def _mount_arguments(self, mounts: Sequence[Mount]) -> list[str]:
        arguments: list[str] = []
        for folder in self._folders:
            arguments += ["--bind", str(self.place(folder)), folder]
        arguments += ["--bind", str(self.place("/shm")), "/dev/shm"]
        for mount in mounts:
            arguments += ["--bind" if mount.is_writable else "--ro-bind", str(mount.source), mount.target]
        # What bubblewrap makes itself lies on a tmpfs without a size.
        return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/"]

    def _variable_arguments(self, variables: Mapping[str, str]) -> list[str]:
        merged = {**self._variables, **variables}
        return [word for name, value in merged.items() for word in ("--setenv", name, value)]

    def _first_process(self, limits: Limits) -> str:
        """Return the script of the first process inside: it sets rlimits, runs the command and reaps orphans."""
        cpu_s = math.ceil(limits.cpu_s)
        lines = ["ulimit -c 0", f"ulimit -S -t {cpu_s}", f"ulimit -H -t {cpu_s + 1}"]
        if "memory" not in self._isolation.controllers:
            lines.append(f"ulimit -v {limits.memory_bytes // 1024}")
        if "pids" not in self._isolation.controllers and self._isolation.limits_forks_by_rlimit:
            lines.append(f"ulimit -u {limits.max_processes + 1}")
        if not self._isolation.has_tmpfs:
            lines.append(f"ulimit -f {max(1, self._limits.disk_bytes // 1024)}")
        # Here rather than by bubblewrap: an agent may have removed or locked its working folder, which is no failure
        # of ours. It is told so, and its command runs in /.
        lines.append('cd -- "$0"')
        # What this shell itself has to say ("Killed") is about the command's shell, which the agent doesn't
        # know.
        return "; ".join([*lines, "exec 3>&2 2>/dev/null", '/bin/bash -c "$1" 2>&3 3>&-', "exit $?"])

    def _count(self) -> tuple[float, int, int]:
        return self._group.cpu_s(), self._group.num_memory_kills(), self._group.num_refused_forks()

    async def _check(self, limits: Limits, cpu_before_s: float) -> str:
        if self._group.counts_cpu and self._group.cpu_s() - cpu_before_s > limits.cpu_s:
            return "cpu"
        if not self._isolation.has_tmpfs:
            used = await asyncio.to_thread(storage.used_bytes, self._files)
            if used > self._limits.disk_bytes:
                return "disk"
        return ""

    def _result(self, ended: Ended, output: BoundedOutput, before: tuple[float, int, int]) -> CommandResult:
        _, kills, refused = self._count()
        limit = ended.limit
        if not limit and kills > before[1]:
            limit = "memory"
        elif not limit and ended.exit_code in _SIGNALLED_LIMITS:
            limit = _SIGNALLED_LIMITS[ended.exit_code]
        elif not limit and not ended.has_run and not ended.was_killed:
            raise EnvironmentFailure(
                f"expected bubblewrap to start the command, got: {output.text().strip() or 'nothing'} "
                f"(exit code {ended.exit_code}, {self._group_name})"
            )
        elif not limit and self._disk_is_full():
            limit = "disk"
        elif not limit and refused > before[2]:
            limit = "processes"
        return CommandResult(
            output=output.text(),
            exit_code=ended.exit_code,
            limit=limit,
            was_killed=ended.was_killed,
            duration_s=ended.duration_s,
            num_bytes=output.num_bytes,
            num_bytes_dropped=output.num_bytes_dropped,
        )

    def _disk_is_full(self) -> bool:
        if not self._isolation.has_tmpfs:
            return storage.used_bytes(self._files) > self._limits.disk_bytes
        disk = os.statvfs(self._files)
        return disk.f_bavail == 0 or disk.f_favail == 0

    async def stop(self) -> None:
        """Kill the command that runs, if one does, and wait until its `run` has ended."""
        if self._is_running:
            self._kill_running()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 2 * DEATH_LIMIT_S)

    def close(self) -> None:
        """Kill what is left and remove everything. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._group.kill()
        for folder in self._side_folders:
            storage.unmount(folder)
        try:
            for folder in (*self._side_folders, self._world):  # empty once their tmpfs is gone
                folder.rmdir()
        except OSError:
            storage.remove_tree(self._world)
        self._group.remove()


def _encodable(command: str) -> str:
    """Replace lone surrogates, which can't be passed to a program."""
    return command.encode("utf-8", errors="replace").decode("utf-8")
