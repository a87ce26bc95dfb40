"""One sandboxed process tree: started, read, watched and killed. No file system, no text.

Who waits for what, and for how long:

| who    | waits for                            | limit                       | released by           |
| ------ | ------------------------------------ | --------------------------- | --------------------- |
| `wait` | the command's end                    | its wall time               | exit, or a limit      |
| `wait` | the death of a killed tree           | `DEATH_LIMIT_S`             | the kernel            |
| `wait` | end of output after the tree is dead | `DEATH_LIMIT_S`             | the kernel            |
| `stop` | the same as both, blocking, when cancelled | `DEATH_LIMIT_S`       | the kernel            |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from thundersyncrl.environments.cgroup import ControlGroup
from thundersyncrl.environments.output import BoundedOutput
from thundersyncrl.errors import EnvironmentFailure

DEATH_LIMIT_S = 10.0
"""How long a tree may take to die after SIGKILL; only a stuck kernel takes longer."""
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process tree ended."""

    exit_code: int
    """The command's; 128 + signal number if it was killed."""
    limit: str
    """The limit that we killed it for: "wall", "output" or what the check named; empty for none."""
    was_killed: bool
    """True when we killed it, for a limit or because the world was closed."""
    has_run: bool
    """True when the command itself was started and its end seen; False when the sandbox could not be built."""
    duration_s: float


class ProcessTree:
    """A bubblewrap with everything inside of it; it starts when it's waited for.

    It must be made in a thread that lives on (the event loop's): the kernel kills the tree when that thread
    ends.

    Args:
        launcher: arguments that wait for a line on standard input and then run the rest.
        bwrap: builds bubblewrap's arguments, given the file descriptor for its status.
        group: control group to put it in.
        output: takes standard output and standard error, in the order in which they are written.

    Raises:
        OSError: no process could be started.
    """

    def __init__(
        self,
        launcher: Sequence[str],
        bwrap: Callable[[int], Sequence[str]],
        *,
        group: ControlGroup,
        output: BoundedOutput,
    ) -> None:
        self._group = group
        self._output = output
        self._started = time.monotonic()
        self._status = b""
        self._was_killed = False
        self._output_fd, output_write = os.pipe()
        self._status_fd, status_write = os.pipe()
        os.set_blocking(self._output_fd, False)
        os.set_blocking(self._status_fd, False)
        try:
            # No preexec_fn and no user change here: Python then starts the child by vfork, whose cost doesn't
            # grow with the memory of our process, which holds a model.
            self._process = subprocess.Popen(
                [*launcher, *bwrap(status_write)],
                stdin=subprocess.PIPE,
                stdout=output_write,
                stderr=output_write,
                cwd="/",
                env={},
                pass_fds=(status_write,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._output_fd)
            os.close(self._status_fd)
            raise
        finally:
            os.close(output_write)
            os.close(status_write)
        self._exit_fd = os.pidfd_open(self._process.pid)

    async def _begin(self) -> None:
        assert self._process.stdin is not None
        # A launcher that has ended already has said why; its output and exit code tell.
        with contextlib.suppress(BrokenPipeError, ProcessLookupError):
            # The kernel may take tens of milliseconds for this, in which the event loop has better things to do.
            await in_thread(lambda: self._group.add(self._process.pid))
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()

    async def wait(self, *, wall_s: float, max_output_bytes: int, check: Callable[[], Awaitable[str]]) -> Ended:
        """Return how the tree ended, after every process of it is dead. Cancelled, it kills the tree first.

        Args:
            wall_s: killed after this.
            max_output_bytes: killed when it has printed more.
            check: called now and then; a non-empty answer names a limit that has been passed, and kills.

        Raises:
            EnvironmentFailure: the tree does not die.
            OSError: the process can't be put into its control group.
        """
        loop = asyncio.get_running_loop()
        exited, closed, flooded = loop.create_future(), loop.create_future(), loop.create_future()

        def on_output() -> None:
            if not self._read_output():
                loop.remove_reader(self._output_fd)
                closed.set_result(None)
            elif self._output.num_bytes > max_output_bytes and not flooded.done():
                flooded.set_result(None)

        def on_exit() -> None:
            loop.remove_reader(self._exit_fd)
            exited.set_result(None)

        try:
            await self._begin()
            loop.add_reader(self._output_fd, on_output)
            loop.add_reader(self._exit_fd, on_exit)
            limit = await self._until_over(exited, flooded, wall_s, check)
            if limit:
                self.kill()
            if not await _within(exited, 1.0):
                self._kill_hard()
            if not (await _within(exited, DEATH_LIMIT_S) and await _within(closed, DEATH_LIMIT_S)):
                raise EnvironmentFailure(
                    f"expected a killed command to be dead within {DEATH_LIMIT_S:g} s, got a live one "
                    f"(process {self._process.pid}); the kernel does not end it, drop this world"
                )
            return self._ended(limit)
        finally:
            loop.remove_reader(self._output_fd)
            loop.remove_reader(self._exit_fd)
            self.stop()

    async def _until_over(
        self,
        exited: asyncio.Future[None],
        flooded: asyncio.Future[None],
        wall_s: float,
        check: Callable[[], Awaitable[str]],
    ) -> str:
        while True:
            left_s = self._started + wall_s - time.monotonic()
            if left_s <= 0:
                return "wall"
            await asyncio.wait({exited, flooded}, timeout=min(left_s, _POLL_S), return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return ""
            if flooded.done():
                return "output"
            limit = await check()
            if limit:
                return limit

    def _read_output(self) -> bool:
        """Read what is there, but not for ever; return False at the end of output."""
        for _ in range(16):
            try:
                data = os.read(self._output_fd, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._output.feed(data)
        return True

    def _read_status(self) -> dict[str, int]:
        """Return what bubblewrap has said so far: "child-pid" once it is known, "exit-code" at the end."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._status_fd, 4096):
                self._status += data
        said: dict[str, int] = {}
        for line in self._status.splitlines():
            with contextlib.suppress(ValueError):  # a line that isn't whole yet
                said.update(json.loads(line))
        return said

    def kill(self) -> None:
        """Kill the first process inside, and with it all others; bubblewrap then reaps it and ends by itself."""
        self._was_killed = True
        inner = self._read_status().get("child-pid", 0)
        if inner and _parent_of(inner) == self._process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(inner, signal.SIGKILL)
        else:  # not built yet: everything is still in the process group that we made
            self._kill_hard()

    def _kill_hard(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._group.kill()

    def _ended(self, limit: str) -> Ended:
        code = self._process.wait()
        return Ended(
            exit_code=code if code >= 0 else 128 - code,
            limit=limit,
            was_killed=self._was_killed,
            has_run="exit-code" in self._read_status(),
            duration_s=time.monotonic() - self._started,
        )

    def stop(self) -> None:
        """Kill what is left, reap it and close everything. Idempotent; blocks for as long as dying takes."""
        if self._exit_fd < 0:
            return
        if self._process.poll() is None:
            self.kill()
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._kill_hard()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(DEATH_LIMIT_S)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        for fd in (self._output_fd, self._status_fd, self._exit_fd):
            os.close(fd)
        self._exit_fd = -1


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread. Cancelled, it still waits for the work: nobody may remove what it works on."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


async def _within(future: asyncio.Future[None], limit_s: float) -> bool:
    await asyncio.wait({future}, timeout=limit_s)
    return future.done()


def _parent_of(pid: int) -> int:
    """Return the parent of a process; 0 when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[1])
