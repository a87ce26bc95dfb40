"""Inline placement: engine and learner take turns on one compute thread, while tools run and the event loop stays free.

| who     | waits for                       | released by                     |
| ------- | ------------------------------- | ------------------------------- |
| a slice | the compute thread              | the slice before it             |
| serve   | work of the engine or learner   | `wake`, called with new work    |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from thundersyncrl.errors import WatchdogError
from thundersyncrl.rollout.engine import Worker
from thundersyncrl.runtime.learner_host import LearnerHost

T = TypeVar("T")


class Streamed(Worker, Protocol):
    """A worker that can tell work which is sure to count from work that may be for nothing; the learner is one."""

    @property
    def has_sure_work(self) -> bool: ...

    @property
    def recheck_s(self) -> float | None: ...

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
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._learner.recheck_s):
                        await self._event.wait()

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the compute thread, between slices, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def close(self) -> None:
        """Let the compute thread end. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class InlineTransport:
    """Implements `Transport`: calls that answer run on the compute thread, between slices."""

    def __init__(self, runtime: InlineRuntime, host: LearnerHost):
        self._runtime = runtime
        self._host = host

    def tell(self, method: str, *args: Any) -> None:
        getattr(self._host, method)(*args)
        self._runtime.wake()

    async def ask(self, method: str, *args: Any, limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                return await self._runtime.call(lambda: getattr(self._host, method)(*args))
        except TimeoutError:
            raise WatchdogError(
                f"expected the learner to answer `{method}` within {limit_s:g} s, it has not; raise the limit, or "
                "give it less work"
            ) from None
