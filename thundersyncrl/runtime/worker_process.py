"""A worker process: started, told what to build, and gone when its controller is.

| who           | waits for                        | released by                                              |
| ------------- | -------------------------------- | -------------------------------------------------------- |
| `build`       | the worker's parts to be there   | the worker, its death, or `START_LIMIT_S`                |
| the worker    | messages                         | the controller; the end of the socket ends the worker    |
| `close`       | the process to end               | the end of its socket; after `CLOSE_LIMIT_S` it is killed |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from typing import Any

from thundersyncrl.errors import WorkerError
from thundersyncrl.observe.events import EventLog
from thundersyncrl.runtime.channel import Channel

START_LIMIT_S = 600.0
"""Loading a large model from a slow disk takes minutes."""
CLOSE_LIMIT_S = 10.0
MODULE = "thundersyncrl.worker"


class WorkerProcess:
    """One worker. Make it in the event loop.

    Args:
        role: "engine" or "learner".
        descriptors: of shared memory that the worker inherits; it finds them under the same numbers.
        events: takes what the worker did when.
        on_lost: called once with the reason if the worker ends or fails by itself.
    """

    def __init__(
        self, role: str, *, descriptors: Sequence[int], events: EventLog, on_lost: Callable[[Exception], None]
    ):
        self._role = role
        self._is_built = False
        ours, theirs = Pipe()
        try:
            # a session of its own: Ctrl-C reaches the controller only, which ends its workers in order
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, role, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(), *descriptors),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.channel = Channel(ours, who=role, explain=self._explain, on_news=events.extend, on_lost=on_lost)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def build(self, *args: Any) -> Any:
        """Let the worker build its parts; return what it says of them."""
        answer = await self.channel.ask("build", *args, limit_s=START_LIMIT_S)
        self._is_built = True
        return answer

    def _explain(self, reason: str) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)  # its socket has ended, so it is all but gone
        return WorkerError(
            f"expected the {self._role} process (pid {self.pid}) to live, it {_ending(self._process.poll())} "
            f"({reason}); what it said before is above; a kill without a word is often the kernel's, for lack of "
            "memory. Go on from the last checkpoint with --resume"
        )

    async def close(self) -> None:
        """End the worker, by force if it must be. Idempotent."""
        self.channel.close()
        if not self._is_built:  # it still loads, doesn't look at its messages, and has nothing to lose
            self.kill()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its socket"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
