"""An engine that keeps the weights of several policy versions: a trajectory ends under the version it began with.

| who                  | waits for                        | released by                          |
| -------------------- | -------------------------------- | ------------------------------------ |
| `sample`             | as the embedded engine's         | a slice of its version               |
| `publish`            | nothing: live requests go on     | -                                    |
| a version's weights  | its last trajectory              | `release`; freed by the next publish |

For asynchronous runs only. A synchronous run samples from the learner's own weights, in one copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thundersyncrl.errors import EngineError, PublishError
from thundersyncrl.learner.policy import Policy
from thundersyncrl.observe.events import EventLog, NoEvents
from thundersyncrl.records import Receipt
from thundersyncrl.rollout.embedded import EmbeddedEngine
from thundersyncrl.rollout.engine import Sample, SampleRequest


@dataclass(frozen=True, slots=True, eq=False)
class _Live:
    """A version with an engine of its own."""

    policy: Policy
    engine: EmbeddedEngine


class VersionedEngine:
    """Implements `Engine` and `Worker` for rollouts that run ahead; `publish` may come while requests are live.

    A session samples from the version that was newest at its first request, until it is released. Each version that a
    session holds costs memory: a copy of the trained weights, the decoder's packed copies of its layers, and a cache
    of up to `rollout.cache_tokens`. Frozen weights are shared.

    Args:
        source: the policy that the learner trains; read by `publish` only.
        make: makes the engine of one version.
        max_concurrent: sequences that run at once, over all versions; older versions go first.
        on_work: as the embedded engine's.
    """

    def __init__(
        self,
        source: Policy,
        make: Callable[[Policy], EmbeddedEngine],
        *,
        max_concurrent: int,
        on_work: Callable[[], None] = lambda: None,
    ):
        self.on_work = on_work
        self._source = source
        self._make = make
        self._max_concurrent = max_concurrent
        self._events: EventLog = NoEvents()
        # oldest first; both replaced as a whole, as two threads read them
        self._live: tuple[_Live, ...] = ()
        self._coming: tuple[_Live, ...] = ()
        self._free: list[Policy] = []
        self._version_of: dict[str, _Live] = {}
        self._is_closed = False
        self._context_tokens = make(source).context_tokens  # refuses what no version could serve

    @property
    def version(self) -> int:
        """Newest policy version; -1 before the first publish."""
        return self._live[-1].engine.version if self._live else -1

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions whose weights are kept, oldest first."""
        return tuple(live.engine.version for live in self._live)

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    def log_to(self, events: EventLog) -> None:
        """Tell this log of every slice from now on."""
        self._events = events
        for live in self._live:
            live.engine.log_to(events)

    async def sample(self, request: SampleRequest) -> Sample:
        if self._is_closed:
            raise EngineError(f"expected an open engine, got a request after `close` ({request.id})")
        if not self._live:
            raise EngineError(f"expected a published version, got a request before the first ({request.id})")
        return await self._version_of.setdefault(request.session, self._live[-1]).engine.sample(request)

    def cancel(self, request_id: str) -> None:
        for live in self._live:
            live.engine.cancel(request_id)

    def release(self, session: str) -> None:
        if (live := self._version_of.pop(session, None)) is not None:
            live.engine.release(session)

    async def publish(self, version: int) -> Receipt:
        """Copy the source's weights into a version of their own, for sessions that begin from now on.

        Nobody may write to the source meanwhile.

        Raises:
            PublishError: `version` isn't the next one, or the engine is closed.
        """
        if self._is_closed:
            raise PublishError(f"expected an open engine at publish of version {version}, got a closed one")
        if self._coming:
            raise PublishError(f"expected no publish under way at version {version}, got one; await it first")
        if self._live and version != self.version + 1:
            raise PublishError(f"expected version {self.version + 1}, got version {version}; publish versions in order")
        await self._drop_unused()
        policy = self._free.pop() if self._free else _own_copy(self._source)
        _copy_trained(self._source, policy)
        engine = self._make(policy)
        engine.on_work = lambda: self.on_work()
        engine.log_to(self._events)
        # A slice of it answers; until then sessions begin with the version before.
        self._coming = (_Live(policy, engine),)
        try:
            receipt = await engine.publish(version)
            self._live = (*self._live, *self._coming)
        finally:
            self._coming = ()
        return receipt

    async def _drop_unused(self) -> None:
        used = set(map(id, self._version_of.values()))
        unused = [live for live in self._live if id(live) not in used]
        self._live = tuple(live for live in self._live if id(live) in used)
        for live in unused:
            await live.engine.close()
            self._free.append(live.policy)

    async def close(self) -> None:
        self._is_closed = True
        for live in (*self._live, *self._coming):
            await live.engine.close()
        self._live, self._free = (), []
        self._version_of.clear()

    @property
    def has_work(self) -> bool:
        return any(live.engine.has_work for live in (*self._live, *self._coming))

    def run_once(self) -> None:
        """Run a slice of each version that has work, the oldest first: its trajectories are trained first."""
        now = (*self._live, *self._coming)
        running = {id(live): live.engine.stats.num_running for live in now}
        for live in now:
            if live.engine.has_work:
                del running[id(live)]
                live.engine.limit_concurrent(max(0, self._max_concurrent - sum(running.values())))
                live.engine.run_once()
                running[id(live)] = live.engine.stats.num_running


def _own_copy(source: Policy) -> Policy:
    """Return a policy with trained parameters of its own and the source's frozen ones."""
    shared = {id(p): p for p in source.model.parameters() if not p.requires_grad}
    return copy.deepcopy(source, shared)


@torch.no_grad()
def _copy_trained(source: Policy, to: Policy) -> None:
    for name, parameter in to.trained.items():
        parameter.copy_(source.trained[name])
