"""The engine protocol: sample tokens from one policy version, and say exactly from which distribution.

Who waits for what:

| who                      | waits for                    | released by                     |
| ------------------------ | ---------------------------- | ------------------------------- |
| `sample`                 | room for its sequence        | another sequence ends           |
| `publish`                | nothing: refuses while busy  | -                               |
| the next step's requests | the receipt of the version   | `publish`                       |
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from thundersyncrl.records import FinishReason, Receipt, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One turn to sample.

    A sample depends on the weights, `prompt_ids`, `temperature` and `seed`; never on what else is in the batch.
    """

    id: str
    """Unique among live requests; used to cancel."""
    session: str
    """Key of the kept keys and values: a later request of the same session whose `prompt_ids` extend what the
    session holds prefills only the new tokens."""
    prompt_ids: tuple[int, ...]
    """[T] the whole context, first turn to now."""
    max_new_tokens: int
    temperature: float
    """Divides the logits. 0 means greedy; the log-prob is then that of the temperature-1 distribution."""
    seed: int
    stop_ids: frozenset[int] = frozenset()
    """Sampling ends after any of these; the stop token is part of the action."""
    stop_strings: tuple[str, ...] = ()
    """Sampling ends after the token that completes any of these; that token is part of the action."""
    shared_prefix: str = ""
    """Requests with the same key are expected to begin with the same prompt (the group's): prefilled once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What was sampled, with the log-probs of the distribution really sampled from."""

    token_ids: tuple[int, ...]
    """[T_act]"""
    logprobs: tuple[float, ...]
    """[T_act] nats, after temperature."""
    finish: FinishReason
    version: int


def request_seed(seed: int, id: TrajectoryId, turn: int) -> int:
    """Return the seed of one request, in [0, 2^63): the same in every process, and apart for each turn.

    Example:
        >>> request_seed(0, TrajectoryId(1, 2, 3), 0)
        6349546869149258714
    """
    digest = hashlib.blake2b(f"{seed}/{id}/turn={turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Engine(Protocol):
    """Samples tokens at one policy version at a time.

    Keys and values never survive a change of version.
    """

    @property
    def version(self) -> int:
        """Policy version now live."""
        ...

    @property
    def context_tokens(self) -> int:
        """Largest prompt plus answer, in tokens."""
        ...

    async def sample(self, request: SampleRequest) -> Sample:
        """Return the sample of one request.

        Raises:
            EngineError: the request can't be served (too long for the context or the cache; duplicate id).
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End a live request now; its `sample` returns what there is, finish CANCELLED. Unknown ids are ignored."""
        ...

    def release(self, session: str) -> None:
        """Forget a session's keys and values. Unknown sessions are ignored."""
        ...

    async def publish(self, version: int) -> Receipt:
        """Make `version` live and forget all keys and values.

        Raises:
            PublishError: requests are live, or `version` isn't the next one.
        """
        ...

    async def close(self) -> None:
        """Free everything. Idempotent."""
        ...


class Worker(Protocol):
    """A part that computes in bounded slices, so that one process can serve several in turn."""

    @property
    def has_work(self) -> bool:
        """True when `run_once` would do something."""
        ...

    def run_once(self) -> None:
        """Do one bounded slice of work. Called from the compute thread; never from two threads at once."""
        ...
