"""The program of a worker process: `python -m thundersyncrl.worker ROLE DESCRIPTOR CONTROLLER`.

It builds its part from the config, then works in slices and looks at its messages between them. It ends with its
controller: the kernel kills it when the controller dies, and the end of its socket ends it otherwise.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from thundersyncrl.build import build_engine, build_learner
from thundersyncrl.config import Config
from thundersyncrl.observe.events import EventBuffer
from thundersyncrl.records import Receipt, Trajectory
from thundersyncrl.rollout.embedded import EmbeddedEngine
from thundersyncrl.rollout.engine import Sample, SampleRequest
from thundersyncrl.rollout.versions import VersionedEngine
from thundersyncrl.runtime.channel import Message, WorkerEnd
from thundersyncrl.runtime.cores import IDLE_S, Cores
from thundersyncrl.runtime.learner_host import LearnerHost
from thundersyncrl.runtime.processes import Placed
from thundersyncrl.runtime.shared_weights import attach, share

_PR_SET_PDEATHSIG = 1
ENGINE, LEARNER = 0, 1


def main(role: str, descriptor: int, controller: int) -> None:
    """Serve until the controller is gone."""
    _die_with(controller)
    end = WorkerEnd(Connection(descriptor))
    try:
        message = end.receive()
        if role == "learner":
            _serve_learner(end, message)
        else:
            asyncio.run(_EngineService(end).serve(message))
    except (EOFError, ConnectionError):
        pass  # the controller has ended the conversation
    except Exception as error:
        end.fail(0, error)
        raise SystemExit(1) from None


def _die_with(controller: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != controller:  # it died before the line above
        raise SystemExit(1)


def _cores(place: Placed, worker: int) -> Cores:
    return Cores(place.board, worker, num_workers=2, num_threads=place.num_threads, elastic=place.elastic)


# -- learner ---------------------------------------------------------------------------------------------------------


class _LearnerService(LearnerHost):
    """A host that takes its share of the cores before each piece of work."""

    cores: Cores

    def run_once(self, *, sure_only: bool = False) -> None:
        self.cores.begin()
        super().run_once(sure_only=sure_only)

    def supervised_step(self, transcripts: Sequence[Trajectory]) -> float:
        self.cores.begin()
        return super().supervised_step(transcripts)


def _serve_learner(end: WorkerEnd, first: Message) -> None:
    service, cores, events = _build_learner(end, first)
    while True:
        busy = service.has_work
        if not busy and not end.has_message(IDLE_S):
            cores.end()
        while end.has_message(0.0 if busy else service.recheck_s):
            end.run(service, end.receive(), before_answer=lambda: _tell(end, events))
            busy = service.has_work
        if busy:
            service.run_once()


def _build_learner(end: WorkerEnd, message: Message) -> tuple[_LearnerService, Cores, EventBuffer]:
    config, place = message.args
    try:
        learner = build_learner(config, shares_cores=place.elastic)
        layout = share(learner.policy, place.weights)
    except Exception as error:
        end.fail(message.reply_to, error)
        raise EOFError from None  # the controller has the reason
    service = _LearnerService(learner, pack_tokens=config.learner.pack_tokens)
    service.cores = _cores(place, LEARNER)
    service.events = events = EventBuffer()
    end.answer(message.reply_to, layout)
    return service, service.cores, events


def _tell(end: WorkerEnd, events: EventBuffer) -> None:
    """Send what was done since the last time."""
    if news := events.flush(-1):
        end.tell(news)


# -- engine ----------------------------------------------------------------------------------------------------------


class _EngineService:
    """Answers requests on an event loop while a thread of its own computes."""

    def __init__(self, end: WorkerEnd):
        self._end = end
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_work = threading.Event()
        self._events = EventBuffer()

    async def serve(self, first: Message) -> None:
        config, place = first.args
        try:
            self._engine = self._build(config, place)
        except Exception as error:
            self._end.fail(first.reply_to, error)
            return
        self._end.answer(first.reply_to, None)
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        for target in (self._read, self._compute):
            threading.Thread(target=target, args=(loop, over), daemon=True).start()
        await over

    def _build(self, config: Config, place: Placed) -> EmbeddedEngine | VersionedEngine:
        assert place.layout is not None
        engine = build_engine(config, lambda policy: attach(policy, place.weights, place.layout))  # type: ignore[arg-type]
        engine.on_work = self._has_work.set
        engine.log_to(self._events)
        self._cores = _cores(place, ENGINE)
        return engine

    def _read(self, loop: asyncio.AbstractEventLoop, over: asyncio.Future[None]) -> None:
        try:
            while True:
                message = self._end.receive()
                loop.call_soon_threadsafe(self._dispatch, message)
        except Exception as error:
            loop.call_soon_threadsafe(_finish, over, error)

    def _compute(self, loop: asyncio.AbstractEventLoop, over: asyncio.Future[None]) -> None:
        try:
            while True:
                if not self._has_work.wait(IDLE_S):
                    self._cores.end()
                    self._has_work.wait()
                self._has_work.clear()
                while self._engine.has_work:
                    self._cores.begin()
                    self._engine.run_once()
        except Exception as error:
            loop.call_soon_threadsafe(_finish, over, error)

    def _dispatch(self, message: Message) -> None:
        if message.reply_to:
            task = asyncio.ensure_future(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._end.run(self._engine, message)

    async def _answer(self, message: Message) -> None:
        try:
            value: Sample | Receipt = await self._call(message)
        except Exception as error:
            self._end.fail(message.reply_to, error)
        else:
            _tell(self._end, self._events)
            self._end.answer(message.reply_to, value)

    async def _call(self, message: Message) -> Sample | Receipt:
        (argument,) = message.args
        if message.method == "sample":
            assert isinstance(argument, SampleRequest)
            return await self._engine.sample(argument)
        assert message.method == "publish", message.method
        return await self._engine.publish(argument)


def _finish(over: asyncio.Future[None], error: Exception) -> None:
    if not over.done():
        over.set_exception(error)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
