"""A scripted engine: gives set tokens, delays, errors and aborts, under the contract of a real one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from thundersyncrl.errors import EngineError, PublishError
from thundersyncrl.records import FinishReason, Receipt
from thundersyncrl.rollout.engine import Sample, SampleRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the engine does with one request."""

    token_ids: tuple[int, ...] = ()
    """[T_act] cut after the first stop id and at the request's budget, as a real engine would."""
    logprobs: tuple[float, ...] | None = None
    """[T_act] nats; None gives -1.0 for each token. Returned as given, even where the number is wrong."""
    finish: FinishReason = FinishReason.STOP
    """LENGTH overrides it where the budget cuts."""
    version: int | None = None
    """Version it claims to have sampled with; None is the live one."""
    delay_s: float = 0.0
    """Before the answer; infinity waits until it is cancelled."""
    num_when_cancelled: int = 0
    """Tokens sampled by the time a cancellation arrives."""
    answers_cancel: bool = True
    """False for an engine that has died: `cancel` does nothing."""
    error: Exception | None = None
    """Raised after the delay."""


Script = Callable[[SampleRequest, int], Reply]
"""(request, turn of its session from 0) -> reply."""


def by_turn(replies: Mapping[tuple[str, int], Reply]) -> Script:
    """Return a script that looks replies up by (session, turn); any other request is an EngineError."""

    def script(request: SampleRequest, turn: int) -> Reply:
        if (request.session, turn) not in replies:
            known = ", ".join(f"{s} turn {t}" for s, t in replies)
            raise EngineError(
                f"expected a scripted request, got {request.session} turn {turn}; scripted: {known or 'none'}"
            )
        return replies[request.session, turn]

    return script


class ScriptedEngine:
    """An engine whose samples come from a script; a turn is counted anew after its session is released.

    Args:
        script: what to answer.
        context_tokens: largest prompt plus budget.
        version: policy version at start.

    Example:
        >>> engine = ScriptedEngine(lambda request, turn: Reply(token_ids=(5, 6)))
        >>> request = SampleRequest(
        ...     id="a", session="s", prompt_ids=(1,), max_new_tokens=4, temperature=1.0, seed=0
        ... )
        >>> asyncio.run(engine.sample(request)).token_ids
        (5, 6)
    """

    def __init__(self, script: Script, *, context_tokens: int = 4096, version: int = 0) -> None:
        self.requests: list[SampleRequest] = []
        """Every request, in order of arrival."""
        self.samples: list[Sample] = []
        """Every answer, in the order it was given."""
        self.cancelled: list[str] = []
        """Ids of the live requests that were cancelled."""
        self.released: list[str] = []
        """Sessions that were released, in order."""
        self._script = script
        self._context_tokens = context_tokens
        self._version = version
        self._turns: Counter[str] = Counter()
        self._live: dict[str, asyncio.Event] = {}
        self._is_closed = False

    @property
    def version(self) -> int:
        return self._version

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    @property
    def num_live(self) -> int:
        """Requests that have not been answered."""
        return len(self._live)

    @property
    def sessions(self) -> frozenset[str]:
        """Sessions that hold something."""
        return frozenset(self._turns)

    async def sample(self, request: SampleRequest) -> Sample:
        self._check(request)
        self.requests.append(request)
        reply = self._script(request, self._turns[request.session])
        self._turns[request.session] += 1
        cancel = self._live[request.id] = asyncio.Event()
        try:
            was_cancelled = await self._wait(reply, cancel)
        finally:
            del self._live[request.id]
        if reply.error is not None and not was_cancelled:
            raise reply.error
        self.samples.append(self._answer(request, reply, was_cancelled))
        return self.samples[-1]

    def cancel(self, request_id: str) -> None:
        if request_id in self._live:
            self.cancelled.append(request_id)
            self._live[request_id].set()

    def release(self, session: str) -> None:
        self.released.append(session)
        self._turns.pop(session, None)

    async def publish(self, version: int) -> Receipt:
        if self._live:
            raise PublishError(
                f"expected no live requests at publish of version {version}, got "
                f"{', '.join(sorted(self._live))}; wait for them or cancel them first"
            )
        if version != self._version + 1:
            raise PublishError(f"expected version {self._version + 1}, got {version}; publish versions in order")
        self._version = version
        self._turns.clear()
        return Receipt(version=version, digest=f"scripted-{version}")

    async def close(self) -> None:
        self._is_closed = True
        for event in self._live.values():
            event.set()

    def _check(self, request: SampleRequest) -> None:
        if self._is_closed:
            raise EngineError(f"expected an open engine, got a request after close ({request.id})")
        if request.id in self._live:
            raise EngineError(f"expected a new request id, got {request.id!r}, which is live; ids must be unique")
        if not request.prompt_ids or request.max_new_tokens < 1:
            raise EngineError(
                "expected a prompt and a budget of at least one token each, got "
                f"{len(request.prompt_ids)} and {request.max_new_tokens} ({request.id})"
            )
        num_tokens = len(request.prompt_ids) + request.max_new_tokens
        if num_tokens > self._context_tokens:
            raise EngineError(
                f"expected prompt plus budget of at most {self._context_tokens} tokens, got "
                f"{len(request.prompt_ids)} + {request.max_new_tokens} ({request.id}); ask for less"
            )

    async def _wait(self, reply: Reply, cancel: asyncio.Event) -> bool:
        """Wait for the delay; return True when a cancellation came first."""
        if not reply.answers_cancel:
            cancel = asyncio.Event()
        try:
            async with asyncio.timeout(None if reply.delay_s == float("inf") else reply.delay_s):
                await cancel.wait()
        except TimeoutError:
            return False
        return True

    def _answer(self, request: SampleRequest, reply: Reply, was_cancelled: bool) -> Sample:
        ids, finish = reply.token_ids, reply.finish
        stops = [n for n, token in enumerate(ids, start=1) if token in request.stop_ids]
        ids = ids[: stops[0]] if stops else ids
        if was_cancelled:
            ids, finish = ids[: reply.num_when_cancelled], FinishReason.CANCELLED
        if len(ids) > request.max_new_tokens:
            ids, finish = ids[: request.max_new_tokens], FinishReason.LENGTH
        logprobs = (-1.0,) * len(ids) if reply.logprobs is None else reply.logprobs
        if len(logprobs) == len(reply.token_ids):
            logprobs = logprobs[: len(ids)]
        version = self._version if reply.version is None else reply.version
        return Sample(token_ids=ids, logprobs=logprobs, finish=finish, version=version)
