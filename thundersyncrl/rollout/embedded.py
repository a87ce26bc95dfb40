"""The embedded engine: samples in the learner's process, from the learner's own weights.

| who                    | waits for          | released by                                           |
| ---------------------- | ------------------ | ----------------------------------------------------- |
| `sample`, `publish`    | their future       | a slice of the compute thread, through the event loop |
| the compute thread     | `on_work`          | `sample`, `cancel`, `release`, `publish`              |

The event loop's thread calls the engine protocol, one compute thread calls `run_once`. They meet in a queue, so that
the policy is only ever read in the compute thread.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from thundersyncrl.errors import ConfigError, EngineError, PublishError
from thundersyncrl.learner.policy import Policy
from thundersyncrl.observe.events import EventLog
from thundersyncrl.records import Receipt
from thundersyncrl.rollout.batching import Batcher, Call, EngineStats
from thundersyncrl.rollout.decoder import Decoder
from thundersyncrl.rollout.engine import Sample, SampleRequest

T = TypeVar("T")


class _Promise(Generic[T]):
    """A future of the event loop that the compute thread keeps; only its first answer counts."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def answer(self, value: T) -> None:
        self._loop.call_soon_threadsafe(self._settle, lambda: self.future.set_result(value))

    def fail(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._settle, lambda: self.future.set_exception(error))

    def _settle(self, settle: Callable[[], None]) -> None:
        if not self.future.done():
            settle()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Publish:
    version: int
    promise: _Promise[Receipt]


@dataclass(frozen=True, slots=True)
class _Release:
    session: str


class EmbeddedEngine:
    """Implements `Engine` and `Worker` with the policy of this process.

    `sample` and `publish` answer only while somebody calls `run_once`.

    Args:
        policy: its parameters are read directly; they may change only while no request is live, before a publish.
        context_tokens: largest prompt plus answer.
        max_concurrent: sequences that run at once.
        cache_tokens: limit on the tokens that the cache of keys and values has memory for.
        decode: text of an action's tokens; needed for stop strings only.
        on_work: called, in the event loop's thread, when there is something to do.

    Raises:
        ConfigError: the model's positions end before `context_tokens`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        context_tokens: int,
        max_concurrent: int,
        cache_tokens: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        on_work: Callable[[], None] = lambda: None,
    ):
        positions = getattr(policy.config, "max_position_embeddings", None)
        if positions is not None and context_tokens > positions:
            raise ConfigError(
                f"expected `rollout.context_tokens` of at most {positions}, the model's positions, got {context_tokens}"
            )
        self.on_work = on_work
        self._policy = policy
        self._context_tokens = context_tokens
        self._cache_tokens = cache_tokens
        self._decodes = decode is not None
        self._batcher = Batcher(
            Decoder(policy), max_concurrent=max_concurrent, cache_tokens=cache_tokens, decode=decode
        )
        self._inbox: deque[Call | _Publish | _Release] = deque()
        self._slice = threading.Lock()
        self._is_closed = False
        self._live: dict[str, Call] = {}
        self._is_publishing = False

    @property
    def version(self) -> int:
        """Policy version now live; -1 before the first publish."""
        return self._batcher.version

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    @property
    def stats(self) -> EngineStats:
        """Counts for metrics."""
        return self._batcher.stats

    def log_to(self, events: EventLog) -> None:
        """Tell this log of every slice from now on."""
        self._batcher.events = events

    def limit_concurrent(self, num: int) -> None:
        """Admit no sequence while `num` or more run. Called from the compute thread."""
        self._batcher.max_concurrent = num

    async def sample(self, request: SampleRequest) -> Sample:
        self._check(request)
        promise = _Promise[Sample]()
        call = Call(request=request, answer=promise.answer, fail=promise.fail)
        self._live[request.id] = call
        self._send(call)
        try:
            return await promise.future
        finally:
            call.is_cancelled = True  # of no effect once answered; else the task was cancelled
            del self._live[request.id]

    def cancel(self, request_id: str) -> None:
        call = self._live.get(request_id)
        if call is not None:
            call.is_cancelled = True
            self.on_work()

    def release(self, session: str) -> None:
        if not self._is_closed:
            self._send(_Release(session))

    async def publish(self, version: int) -> Receipt:
        self._check_publish(version)
        promise = _Promise[Receipt]()
        self._is_publishing = True
        self._send(_Publish(version=version, promise=promise))
        try:
            return await promise.future
        finally:
            self._is_publishing = False

    async def close(self) -> None:
        self._fail_all(EngineError("expected an answer, got `close`; close the engine after the last request"))
        await asyncio.to_thread(self._free)

    @property
    def has_work(self) -> bool:
        return not self._is_closed and (bool(self._inbox) or self._batcher.has_work)

    def run_once(self) -> None:
        with self._slice:
            self._run_slice()

    def _run_slice(self) -> None:
        try:
            while self._inbox:
                self._handle(self._inbox[0])
                self._inbox.popleft()  # last: what is handled must not look like no work
            self._batcher.drop_cancelled()
            self._batcher.run_slice()
        except Exception as error:
            # the run ends with the error itself; whoever waits for an answer must not wait for ever
            self._fail_all(EngineError(f"expected a slice of work, got {type(error).__name__}: {error}"))
            raise

    def _fail_all(self, error: EngineError) -> None:
        """Close the engine; every waiting caller gets the error."""
        self._is_closed = True
        for call in list(self._live.values()):
            call.fail(error)

    def _free(self) -> None:
        with self._slice:  # not while a slice reads the cache
            self._inbox.clear()
            self._batcher.free()

    def _handle(self, item: Call | _Publish | _Release) -> None:
        if isinstance(item, Call):
            self._batcher.add(item)
        elif isinstance(item, _Release):
            self._batcher.release(item.session)
        else:
            self._go_live(item)

    def _go_live(self, order: _Publish) -> None:
        try:
            self._batcher.drop_cancelled()
            self._batcher.go_live(order.version)
            order.promise.answer(Receipt(version=order.version, digest=self._policy.digest()))
        except Exception as error:
            order.promise.fail(
                PublishError(f"expected version {order.version} to go live, got {type(error).__name__}: {error}")
            )
            raise

    def _send(self, item: Call | _Publish | _Release) -> None:
        self._inbox.append(item)
        self.on_work()

    def _check_publish(self, version: int) -> None:
        def refuse(expected: str, got: str, remedy: str) -> PublishError:
            return PublishError(f"expected {expected} at publish of version {version}, got {got}; {remedy}")

        if self._is_closed:
            raise refuse("an open engine", "a closed one", "make a new engine")
        if self._is_publishing:
            raise refuse("no publish under way", "one", "await it first")
        if self._live:
            raise refuse("no live requests", ", ".join(sorted(self._live)), "wait for them or cancel them first")
        if self.version >= 0 and version != self.version + 1:
            raise refuse(f"version {self.version + 1}", f"{version}", "publish versions in order")

    def _check(self, request: SampleRequest) -> None:
        """Raise EngineError for a request that can't be served."""

        def refuse(expected: str, got: str, remedy: str) -> EngineError:
            return EngineError(f"expected {expected}, got {got} (request {request.id}); {remedy}")

        num_prompt, budget = len(request.prompt_ids), request.max_new_tokens
        if self._is_closed:
            raise refuse("an open engine", "a request after `close`", "make a new engine")
        if self.version < 0 and not self._is_publishing:
            raise refuse("a live policy version", "none", "call `publish` first")
        if request.id in self._live:
            raise refuse("a new request id", "one that is live", "ids must be unique among live requests")
        if any(call.request.session == request.session for call in self._live.values()):
            raise refuse("one live request per session", f"a second of {request.session!r}", "await the first")
        if num_prompt < 1 or budget < 1:
            raise refuse("a prompt and a budget of at least one token each", f"{num_prompt} and {budget}", "give both")
        if num_prompt + budget > self._context_tokens:
            total = f"prompt plus budget of at most {self._context_tokens} tokens"
            raise refuse(total, f"{num_prompt} + {budget}", "ask for less")
        if not self._batcher.can_ever_hold(request):
            total = f"a request that fits into {self._cache_tokens} cache tokens"
            raise refuse(total, f"{num_prompt} + {budget}", "raise `rollout.cache_tokens`")
        least, most = min(request.prompt_ids), max(request.prompt_ids)
        if least < 0 or most >= self._policy.vocab_size:
            ids = f"token ids from 0 to {self._policy.vocab_size - 1}"
            raise refuse(ids, f"{least} to {most}", "encode with this model's tokenizer")
        if not (math.isfinite(request.temperature) and request.temperature >= 0):
            raise refuse("a temperature of 0 or more", f"{request.temperature}", "use 0 for greedy")
        if "" in request.stop_strings or (request.stop_strings and not self._decodes):
            wanted = "non-empty stop strings and an engine that can decode"
            raise refuse(wanted, f"{request.stop_strings}", "pass `decode` to the engine, or use stop ids")
