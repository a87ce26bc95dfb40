"""Continuous batching: a slice gives every running sequence its next token and prefills a bounded part of new prompts.

| who                 | waits for                                            | released by            |
| ------------------- | ---------------------------------------------------- | ---------------------- |
| a waiting request   | first come, first served: a place in the batch, rows | a request that ends    |
| a member of a group | the prefill of the group's prompt                    | the slice that ends it |

Nothing here knows of threads or event loops: one caller at a time.

Shapes: B sequences, S spans, W width of hidden states.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thundersyncrl.errors import NumericsError
from thundersyncrl.observe.events import EventLog, NoEvents, record
from thundersyncrl.records import FinishReason
from thundersyncrl.rollout.decoder import Decoder, Place, Span
from thundersyncrl.rollout.engine import Sample, SampleRequest
from thundersyncrl.rollout.kv_cache import CacheFull, KvCache
from thundersyncrl.rollout.sampler import draw
from thundersyncrl.rollout.session_cache import Session, SessionCache, SharedPrompt

PREFILL_TOKENS = 512
"""Prompt tokens of one slice, at most: bounds how long running sequences, and the learner, wait."""
STOP_WINDOW = 16
"""Tokens that are decoded anew for each token to look for stop strings, beside four per byte of the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine was made, and its state now."""

    num_slices: int = 0
    num_decode_steps: int = 0
    """Slices in which at least one sequence went on by a token."""
    num_tokens_sampled: int = 0
    num_tokens_prefilled: int = 0
    """Prompt tokens that were computed."""
    num_tokens_reused: int = 0
    """Prompt tokens whose keys and values were kept from the session's last turn."""
    num_tokens_shared: int = 0
    """Prompt tokens of members whose group's prompt another member had brought."""
    num_mismatched: int = 0
    """Requests whose prompt contradicted what their session held; computed from there on."""
    num_evicted: int = 0
    """Idle sessions and prompts that were dropped to make room."""
    num_running: int = 0
    num_waiting: int = 0
    cache_tokens: int = 0
    """Tokens that the cache has memory for now."""
    peak_cache_tokens: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A request on its way to an answer."""

    request: SampleRequest
    answer: Callable[[Sample], None]
    fail: Callable[[Exception], None]
    is_cancelled: bool = False
    since_s: float = field(default_factory=time.monotonic)
    """Arrival."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Running:
    call: Call
    session: Session

    @property
    def num_left(self) -> int:
        """Prompt tokens that are yet to be computed, the shared ones apart."""
        return len(self.call.request.prompt_ids) - len(self.session.token_ids)

    @property
    def prompt_is_ready(self) -> bool:
        return self.session.prompt is None or self.session.prompt.is_ready


@dataclass(slots=True, kw_only=True)
class _Prefill:
    """A slice's prefill: each span with whom it is for."""

    room: int
    """Tokens that it may still take."""
    spans: list[Span] = field(default_factory=list[Span])
    owners: list[_Running | SharedPrompt] = field(default_factory=list["_Running | SharedPrompt"])

    def add(self, owner: _Running | SharedPrompt, place: Place, token_ids: Sequence[int]) -> None:
        if self.room > 0 and token_ids:
            span = Span(place=place, token_ids=tuple(token_ids[: self.room]))
            self.spans.append(span)
            self.owners.append(owner)
            self.room -= len(span.token_ids)


class Batcher:
    """Requests in, samples out, one bounded slice at a time.

    Args:
        decoder: runs the forwards.
        max_concurrent: sequences that run at once.
        cache_tokens: limit on the tokens that the cache has memory for.
        decode: text of an action's tokens, for stop strings.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_concurrent: int,
        cache_tokens: int,
        decode: Callable[[Sequence[int]], str] | None,
    ):
        self.version = -1
        self.events: EventLog = NoEvents()
        self._decoder = decoder
        self._cache = KvCache(decoder.cache_shape, cache_tokens=cache_tokens)
        self._sessions = SessionCache(self._cache)
        self.max_concurrent = max_concurrent
        self._decode = decode
        self._waiting: deque[Call] = deque()
        self._running: list[_Running] = []
        self._num_slices = 0
        self._num_decode_steps = 0
        self._num_tokens_sampled = 0
        self._num_tokens_prefilled = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_slices=self._num_slices,
            num_decode_steps=self._num_decode_steps,
            num_tokens_sampled=self._num_tokens_sampled,
            num_tokens_prefilled=self._num_tokens_prefilled,
            num_tokens_reused=self._sessions.num_tokens_reused,
            num_tokens_shared=self._sessions.num_tokens_shared,
            num_mismatched=self._sessions.num_mismatched,
            num_evicted=self._sessions.num_evicted,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            cache_tokens=self._cache.num_tokens,
            peak_cache_tokens=self._cache.peak_tokens,
        )

    def can_ever_hold(self, request: SampleRequest) -> bool:
        return self._sessions.can_ever_hold(request)

    def add(self, call: Call) -> None:
        self._waiting.append(call)

    def release(self, session: str) -> None:
        """Free a session's rows now, or when its live request ends."""
        self._sessions.forget(session)

    def go_live(self, version: int) -> None:
        """Forget all keys and values and sample from the policy's present weights. No request may be live."""
        start = time.monotonic()
        self._sessions.clear()
        self._decoder.refresh()
        self.version = version
        record(self.events, start, "engine", "publish")

    def free(self) -> None:
        """Drop every request and all memory."""
        self._waiting.clear()
        for running in self._running:
            self._sessions.close(running.session)
        self._running.clear()
        self._sessions.clear()
        self._cache.free_slabs()

    def drop_cancelled(self) -> None:
        """Answer cancelled requests with what was sampled."""
        for call in [c for c in self._waiting if c.is_cancelled]:
            self._waiting.remove(call)
            self._answer(call, FinishReason.CANCELLED)
        for running in [r for r in self._running if r.call.is_cancelled]:
            self._finish(running, FinishReason.CANCELLED)

    @torch.inference_mode()
    def run_slice(self) -> None:
        """Admit what fits, then run one forward and draw one token for each sequence that is ready.

        Raises:
            NumericsError: a logit isn't finite.
        """
        start = time.monotonic()
        self._admit()
        if not self._running:
            return
        decoding = [r for r in self._running if r.call.token_ids]
        prefill = self._plan_prefill()
        ready, hidden = self._forward(decoding, prefill)
        self._num_slices += 1
        self._num_decode_steps += bool(decoding)
        tokens = len(decoding) + sum(len(span.token_ids) for span in prefill.spans)
        if ready:
            self._draw(ready, hidden)
        kinds = [kind for kind, some in (("decode", decoding), ("prefill", prefill.spans)) if some]
        record(self.events, start, "engine", " and ".join(kinds) or "decode", tokens=tokens)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_concurrent:
            request = self._waiting[0].request
            try:
                session = self._sessions.open(request)
            except CacheFull:
                return  # first come, first served: a small request must not starve a large one
            call = self._waiting.popleft()
            self._running.append(_Running(call=call, session=session))
            record(self.events, call.since_s, "controller", "queue", trajectory=request.session)

    def _plan_prefill(self) -> _Prefill:
        prefill = _Prefill(room=PREFILL_TOKENS)
        planned: set[int] = set()
        for running in self._running:
            session, prompt = running.session, running.session.prompt
            if prompt is not None and not prompt.is_ready:
                if id(prompt) not in planned:
                    planned.add(id(prompt))
                    prefill.add(prompt, Place(own=prompt.row), prompt.token_ids[prompt.row.length :])
            elif running.num_left:
                prefill.add(running, session.place, running.call.request.prompt_ids[len(session.token_ids) :])
        return prefill

    def _forward(self, decoding: list[_Running], prefill: _Prefill) -> tuple[list[_Running], Tensor]:
        """Return the sequences that can draw a token now, with their last hidden states [B, W]."""
        ready, rows = list(decoding), list[Tensor]()
        if decoding or prefill.spans:
            tokens = [r.call.token_ids[-1] for r in decoding]
            hidden = self._decoder.forward(tokens, [r.session.place for r in decoding], prefill.spans)
            for running, token in zip(decoding, tokens, strict=True):
                running.session.token_ids.append(token)
            rows.append(hidden[: len(decoding)])
            ready += self._credit(prefill, hidden[len(decoding) :], rows)
        for running in self._running:
            prompt = running.session.prompt
            # the whole prompt is the group's: there is nothing of its own to compute
            is_new = not running.num_left and running.session.row.length == 0
            if is_new and prompt is not None and prompt.last_hidden is not None:
                ready.append(running)
                rows.append(prompt.last_hidden[None])
        return ready, torch.cat(rows) if rows else torch.empty(0)

    def _credit(self, prefill: _Prefill, hidden: Tensor, rows: list[Tensor]) -> list[_Running]:
        """Note what the spans computed; return the sequences whose prompt is done, adding their hidden states."""
        done: list[_Running] = []
        for owner, span, last in zip(prefill.owners, prefill.spans, hidden, strict=True):
            self._num_tokens_prefilled += len(span.token_ids)
            if isinstance(owner, SharedPrompt):
                if owner.row.length == len(owner.token_ids):
                    owner.last_hidden = last.clone()
                continue
            owner.session.token_ids.extend(span.token_ids)
            if not owner.num_left:
                done.append(owner)
                rows.append(last[None])
        return done

    def _draw(self, ready: list[_Running], hidden: Tensor) -> None:
        requests = [r.call.request for r in ready]
        token_ids, logprobs = draw(
            self._decoder.logits(hidden),
            temperatures=[request.temperature for request in requests],
            seeds=[request.seed for request in requests],
            positions=[len(r.call.request.prompt_ids) + len(r.call.token_ids) for r in ready],
        )
        if not bool(torch.isfinite(logprobs).all()):
            bad = requests[int((~torch.isfinite(logprobs)).nonzero()[0])]
            raise NumericsError(
                f"expected finite logits, got NaN or infinity (version {self.version}, request {bad.id}); the weights "
                "have diverged: lower the learning rate, or resume from an older checkpoint"
            )
        self._num_tokens_sampled += len(ready)
        for running, token, logprob in zip(ready, token_ids.tolist(), logprobs.tolist(), strict=True):
            running.call.token_ids.append(token)
            running.call.logprobs.append(logprob)
            finish = self._finish_reason(running.call)
            if finish is not None:
                self._finish(running, finish)

    def _finish_reason(self, call: Call) -> FinishReason | None:
        request = call.request
        if call.token_ids[-1] in request.stop_ids or self._ends_with_stop_string(call):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(call.token_ids) >= request.max_new_tokens else None

    def _ends_with_stop_string(self, call: Call) -> bool:
        stops = call.request.stop_strings
        if not stops or self._decode is None:
            return False
        window = STOP_WINDOW + 4 * max(len(stop.encode()) for stop in stops)
        tail = self._decode(call.token_ids[-window:])
        if not any(stop in tail for stop in stops):
            return False
        whole = tail if len(call.token_ids) <= window else self._decode(call.token_ids)
        return any(stop in whole for stop in stops)

    def _finish(self, running: _Running, finish: FinishReason) -> None:
        self._running.remove(running)
        self._sessions.close(running.session)
        self._answer(running.call, finish)

    def _answer(self, call: Call, finish: FinishReason) -> None:
        call.answer(
            Sample(
                token_ids=tuple(call.token_ids),
                logprobs=tuple(call.logprobs),
                finish=finish,
                version=self.version,
            )
        )
