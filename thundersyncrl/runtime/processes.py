"""Engine and learner as two processes over one copy of the weights, with the controller's ends of both.

| who                | waits for                          | released by                             |
| ------------------ | ---------------------------------- | --------------------------------------- |
| `start`            | both workers to load the model     | the workers, or `START_LIMIT_S`         |
| `serve`            | a worker's end                     | its failure, or the run's end           |
| `RemoteEngine`     | samples and receipts               | the engine process                      |
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from thundersyncrl.config import Config
from thundersyncrl.observe.events import EventLog, NoEvents
from thundersyncrl.records import Receipt
from thundersyncrl.rollout.engine import Sample, SampleRequest
from thundersyncrl.runtime.cores import halves, make_board
from thundersyncrl.runtime.shared_weights import Layout, make_memory
from thundersyncrl.runtime.worker_process import WorkerProcess

SAMPLE_LIMIT_S = 24 * 3600.0
"""A trajectory's own limit ends a sample much earlier; this only keeps the wait from having none."""
PUBLISH_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What a worker needs to know of its place on the machine."""

    weights: int
    """Descriptor of the weights' memory."""
    board: int
    """Descriptor of the memory in which workers say that they compute."""
    num_threads: int
    elastic: bool
    layout: Layout | None = None
    """Of the weights; None for the learner, which lays them out."""


class ProcessRuntime:
    """Owns the two processes.

    Args:
        events: takes what both did when.
        cores: that the run may use.
    """

    def __init__(self, events: EventLog, cores: Iterable[int]) -> None:
        self._events = events
        self._cores = frozenset(cores)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._weights, self._board = make_memory(), make_board(2)
        self._is_closed = False
        self.learner = self._worker("learner")
        self.engine = self._worker("engine")

    def _worker(self, role: str) -> WorkerProcess:
        return WorkerProcess(role, descriptors=(self._weights, self._board), events=self._events, on_lost=self._fail)

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        num_threads: int,
        elastic: bool,
        events: EventLog | None = None,
        cores: Iterable[int] | None = None,
    ) -> Self:
        """Start both processes, and return once both have the model.

        Args:
            config: of the run.
            num_threads: of engine and learner together.
            elastic: whether cores follow the work; if not, each side keeps its half, and what this thread starts from
                now on (sandboxes) stays off the learner's.
            events: takes what both did when.
            cores: that the run may use; None takes those of this thread.

        Raises:
            ConfigError: what a worker refuses.
            WorkerError: one ended.
        """
        runtime = cls(events or NoEvents(), os.sched_getaffinity(0) if cores is None else cores)
        place = Placed(weights=runtime._weights, board=runtime._board, num_threads=num_threads, elastic=elastic)
        try:
            if not elastic:
                runtime._keep_apart(num_threads)
            layout = await runtime.learner.build(config, place)
            await runtime.engine.build(config, replace(place, layout=layout))
        except BaseException:
            await runtime.close()
            raise
        return runtime

    def _keep_apart(self, num_threads: int) -> None:
        rollouts, learner = halves(self._cores, num_threads)
        os.sched_setaffinity(self.learner.pid, learner)
        os.sched_setaffinity(self.engine.pid, rollouts)
        os.sched_setaffinity(0, rollouts)

    async def serve(self) -> None:
        """Return never; raise the reason when a worker fails or ends."""
        await self._failure

    async def close(self) -> None:
        """End both processes. Idempotent."""
        await asyncio.gather(self.learner.close(), self.engine.close())
        if not self._is_closed:
            self._is_closed = True
            os.sched_setaffinity(0, self._cores)
            os.close(self._weights)
            os.close(self._board)
        if self._failure.done() and not self._failure.cancelled():
            self._failure.exception()  # seen


class RemoteEngine:
    """Implements `Engine` in the controller, for an engine in another process."""

    def __init__(self, worker: WorkerProcess, *, context_tokens: int):
        self._channel = worker.channel
        self._context_tokens = context_tokens
        self._version = -1

    @property
    def version(self) -> int:
        return self._version

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    async def sample(self, request: SampleRequest) -> Sample:
        try:
            return await self._channel.ask("sample", request, limit_s=SAMPLE_LIMIT_S)
        except asyncio.CancelledError:
            self.cancel(request.id)
            raise

    def cancel(self, request_id: str) -> None:
        self._channel.tell("cancel", request_id)

    def release(self, session: str) -> None:
        self._channel.tell("release", session)

    async def publish(self, version: int) -> Receipt:
        receipt = await self._channel.ask("publish", version, limit_s=PUBLISH_LIMIT_S)
        self._version = receipt.version
        return receipt

    async def close(self) -> None:
        """The runtime ends the process."""


class RemoteTransport:
    """Implements `Transport` over a worker's channel."""

    def __init__(self, worker: WorkerProcess):
        self._channel = worker.channel

    def tell(self, method: str, *args: Any) -> None:
        self._channel.tell(method, *args)

    async def ask(self, method: str, *args: Any, limit_s: float) -> Any:
        return await self._channel.ask(method, *args, limit_s=limit_s)
