"""What the cache holds for whom: sessions with their own rows, and prompts that the members of a group share.

| who        | waits for                        | released by                                    |
| ---------- | -------------------------------- | ---------------------------------------------- |
| a request  | rows for its prompt and answer   | a request that ends, or the eviction of idle ones |

Idle sessions (their tool runs, or nobody will call again) and prompts without live requests are evicted, longest idle
first; an evicted session is prefilled again. So what waits for a tool never blocks what could run.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thundersyncrl.rollout.decoder import Place
from thundersyncrl.rollout.engine import SampleRequest
from thundersyncrl.rollout.kv_cache import CacheFull, KvCache, Row


@dataclass(slots=True, kw_only=True, eq=False)
class SharedPrompt:
    """A prompt whose keys and values several sessions read."""

    token_ids: tuple[int, ...]
    row: Row
    last_hidden: Tensor | None = None
    """[W] of its last token, once prefilled: the members' first tokens are drawn from it."""
    num_users: int = 0
    """Live requests that read it."""
    last_used: int = 0

    @property
    def is_ready(self) -> bool:
        return self.last_hidden is not None


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """Keys and values kept from turn to turn."""

    key: str
    prompt: SharedPrompt | None
    row: Row
    token_ids: list[int] = field(default_factory=list[int])
    """[T] tokens held, the shared prompt's first."""
    is_live: bool = False
    is_released: bool = False
    """To be freed when its live request ends."""
    last_used: int = 0

    @property
    def place(self) -> Place:
        return Place(own=self.row, prompt=self.prompt.row if self.prompt else None)


class SessionCache:
    """Sessions and shared prompts over one `KvCache`."""

    def __init__(self, cache: KvCache):
        self._cache = cache
        self._sessions: dict[str, Session] = {}
        self._prompts: dict[str, SharedPrompt] = {}
        self._clock = 0
        self.num_evicted = 0
        """Sessions and prompts that were dropped to make room."""
        self.num_mismatched = 0
        """Requests whose prompt contradicted what their session held."""
        self.num_tokens_reused = 0
        """Prompt tokens that a session held from its last turn."""
        self.num_tokens_shared = 0
        """Prompt tokens that another request of the group had brought."""

    def can_ever_hold(self, request: SampleRequest) -> bool:
        return self._cache.can_ever_hold(_num_kept(request, 0))

    def open(self, request: SampleRequest) -> Session:
        """Return the request's session, live, with room for the answer and holding what could be reused of the prompt.

        Raises:
            CacheFull: live requests leave no room now.
        """
        self._clock += 1
        try:
            session = self._resume(request) or self._start(request, share=True)
        except CacheFull:
            if any(s.is_live for s in self._sessions.values()):
                raise
            # nothing runs, yet rows of other sizes are in the way: begin afresh, which always fits
            self.num_evicted += len(self._sessions) + len(self._prompts)
            self.clear()
            session = self._start(request, share=False)
        self._sessions[request.session] = session
        session.is_live = True
        if session.prompt:
            session.prompt.num_users += 1
        return session

    def close(self, session: Session) -> None:
        """Let a session be idle; it may be evicted from now on."""
        session.is_live = False
        session.last_used = self._clock
        if session.prompt:
            session.prompt.num_users -= 1
            session.prompt.last_used = self._clock
        if session.is_released:
            self.forget(session.key)

    def forget(self, key: str) -> None:
        """Free a session now, or when its live request ends; unknown ones are ignored."""
        session = self._sessions.get(key)
        if session is None:
            return
        if session.is_live:
            session.is_released = True
            return
        del self._sessions[key]
        self._cache.free(session.row)

    def clear(self) -> None:
        """Free everything. No request may be live."""
        for key in list(self._sessions):
            self.forget(key)
        for prompt in self._prompts.values():
            self._cache.free(prompt.row)
        self._prompts.clear()

    def _resume(self, request: SampleRequest) -> Session | None:
        """Return the session cut back to what the prompt confirms, or None if that is nothing."""
        session = self._sessions.get(request.session)
        if session is None:
            return None
        common = _num_common(session.token_ids, request.prompt_ids)
        self.num_mismatched += common < min(len(session.token_ids), len(request.prompt_ids))
        # at least one token is computed: its hidden state says what comes next
        kept, base = (
            min(common, len(request.prompt_ids) - 1),
            len(session.prompt.token_ids) if session.prompt else 0,
        )
        if kept < base or kept == 0:
            self.forget(request.session)
            return None
        num_kept = _num_kept(request, base)
        if num_kept > session.row.slab.capacity:
            # not evictable while its row grows
            session.is_live = True
            try:
                row = self._allocate(num_kept)
            finally:
                session.is_live = False
            session.row.length = kept - base
            self._cache.move(session.row, row)
            session.row = row
        session.row.length = kept - base
        del session.token_ids[kept:]
        self.num_tokens_reused += kept
        return session

    def _start(self, request: SampleRequest, *, share: bool) -> Session:
        is_first = request.shared_prefix not in self._prompts
        prompt = self._shared_prompt(request) if share and request.shared_prefix else None
        if prompt is None:
            return Session(key=request.session, prompt=None, row=self._allocate(_num_kept(request, 0)))
        prompt.num_users += 1  # not evictable while the row is found
        try:
            row = self._allocate(_num_kept(request, len(prompt.token_ids)))
        finally:
            prompt.num_users -= 1
        self.num_tokens_shared += 0 if is_first else len(prompt.token_ids)
        return Session(key=request.session, prompt=prompt, row=row, token_ids=list(prompt.token_ids))

    def _shared_prompt(self, request: SampleRequest) -> SharedPrompt | None:
        """Return the group's prompt, or None if this request doesn't begin with it or it can't fit beside the rest."""
        prompt = self._prompts.get(request.shared_prefix)
        if prompt is None:
            num_prompt = len(request.prompt_ids)
            if not self._cache.can_ever_hold(num_prompt, _num_kept(request, num_prompt)):
                return None
            prompt = SharedPrompt(token_ids=request.prompt_ids, row=self._allocate(num_prompt), last_used=self._clock)
            self._prompts[request.shared_prefix] = prompt
        begins = request.prompt_ids[: len(prompt.token_ids)] == prompt.token_ids
        return prompt if begins else None

    def _allocate(self, num_tokens: int) -> Row:
        while True:
            try:
                return self._cache.allocate(num_tokens)
            except CacheFull:
                self._evict_one()

    def _evict_one(self) -> None:
        sessions = {k: s for k, s in self._sessions.items() if not s.is_live}
        readers = {id(s.prompt) for s in self._sessions.values()}
        prompts = {k: p for k, p in self._prompts.items() if not p.num_users and id(p) not in readers}
        if not sessions and not prompts:
            raise CacheFull
        self.num_evicted += 1
        oldest_session = min(sessions, key=lambda k: sessions[k].last_used, default="")
        oldest_prompt = min(prompts, key=lambda k: prompts[k].last_used, default="")
        if not prompts or (sessions and sessions[oldest_session].last_used <= prompts[oldest_prompt].last_used):
            self.forget(oldest_session)
        else:
            self._cache.free(self._prompts.pop(oldest_prompt).row)


def _num_kept(request: SampleRequest, num_shared: int) -> int:
    """Return the tokens that need a place of their own; the last sampled token is never computed."""
    return max(1, len(request.prompt_ids) - num_shared + request.max_new_tokens - 1)


def _num_common(held: Sequence[int], wanted: Sequence[int]) -> int:
    num = min(len(held), len(wanted))
    if list(held[:num]) == list(wanted[:num]):
        return num
    return next(i for i in range(num) if held[i] != wanted[i])
