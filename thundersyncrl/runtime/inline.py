"""Inline placement: engine and learner take turns on one compute thread, while tools run and the event loop stays free.

| who     | waits for                       | released by                     |
| ------- | ------------------------------- | ------------------------------- |
| a slice | the compute thread              | the slice before it             |
| serve   | work of the engine or learner   | `wake`, called with new work    |
| drain   | the learner to run out of work  | the learner's last slice        |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from thundersyncrl.errors import WatchdogError
from thundersyncrl.rollout.engine import Worker

T = TypeVar("T")


class Streamed(Worker, Protocol):
    """A worker that can tell work which is sure to count from work that may be for nothing; the learner is one."""

    @property
    def has_sure_work(self) -> bool: ...

    def run_once(self, *, sure_only: bool = False) -> None: ...


class InlineRuntime:
    """Runs slices of engine and learner in turn.

    Both want the same cores. A decode step costs nearly the same for few sequences as for many, so the engine goes
    first while its batch is full. Once at least half of its sequences have ended or wait for tools, the learner goes
    first with work that is sure to count; work that may turn out to be for nothing only fills time in which the engine
    has nothing to do at all.

    Args:
        engine: samples.
        learner: takes gradients.
        num_sequences: sequences that the engine runs or is about to run.
    """

    def __init__(self, engine: Worker, learner: Streamed, *, num_sequences: Callable[[], int]):
        self._engine = engine
        self._learner = learner
        self._num_sequences = num_sequences
        self._most_sequences = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="thundersync-compute")
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self) -> None:
        """Say that there is new work. Callable from any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._event.set)

    def _slice(self) -> bool:
        """Run the next slice; False when there is nothing to do. On the compute thread, which owns all state."""
        if not self._engine.has_work:
            self._most_sequences = 0
            if not self._learner.has_work:
                return False
            self._learner.run_once()
            return True
        now = self._num_sequences()
        self._most_sequences = max(self._most_sequences, now)
        if 2 * now <= self._most_sequences and self._learner.has_sure_work:
            self._learner.run_once(sure_only=True)
        else:
            self._engine.run_once()
        return True

    async def serve(self) -> None:
        """Run slices until cancelled; an error of a slice ends it."""
        self._loop = asyncio.get_running_loop()
        while True:
            self._event.clear()
            if not await self.call(self._slice):
                await self._event.wait()

    async def drain(self, *, limit_s: float = 3600.0) -> None:
        """Return when the learner has no work left.

        Raises:
            WatchdogError: it still has some after `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        # asked on the compute thread: in the middle of a slice the answer would mean nothing
        while await self.call(lambda: self._learner.has_work):
            if time.monotonic() > deadline:
                raise WatchdogError(f"expected the learner to run out of work within {limit_s:.0f} s, it has not")
            self._event.set()
            await asyncio.sleep(0)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the compute thread, between slices, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def close(self) -> None:
        """Let the compute thread end. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)
