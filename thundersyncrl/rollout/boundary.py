"""The boundary of a rollout: each call into an engine or environment gets a limit, each error a kind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from thundersyncrl.errors import (
    EngineError,
    EnvironmentFailure,
    InvalidOutputError,
    RolloutError,
    TimeLimitError,
    ToolError,
    VerifierError,
)
from thundersyncrl.records import Outcome, Status

T = TypeVar("T")

GRACE_S = 5.0
"""How long a call that was told to stop may take before it's left behind."""

_FAILURE_KINDS: dict[type[RolloutError], str] = {
    EngineError: "engine",
    EnvironmentFailure: "environment",
    ToolError: "tool",
    VerifierError: "verifier",
    TimeLimitError: "timeout",
    InvalidOutputError: "invalid_output",
}


def outcome_of(error: Exception) -> Outcome:
    """Return the FAILED outcome that an error stands for.

    Example:
        >>> outcome_of(ToolError("no shell")).cause, outcome_of(KeyError("x")).cause
        ('tool', 'crash')
    """
    cause = next((name for kind, name in _FAILURE_KINDS.items() if isinstance(error, kind)), "crash")
    reason = str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
    return Outcome(status=Status.FAILED, cause=cause, reason=reason)


async def within(call: Coroutine[Any, Any, T], *, limit_s: float, what: str) -> T:
    """Return the call's result.

    A call that doesn't stop within `GRACE_S` of being told to is left behind, so that nobody waits for it.

    Raises:
        TimeLimitError: no result within `limit_s`; the message says of what.
        RuntimeError: the call was cancelled from inside.
    """
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        await stop(task)
        raise
    if not done:
        await stop(task)
        raise TimeLimitError(f"expected {what} to end within {limit_s:.3g} s, got no result")
    return result_of(task)


def result_of(task: asyncio.Future[T]) -> T:
    """Return the result of a finished task.

    Raises:
        RuntimeError: it was cancelled from inside.
    """
    if task.cancelled():  # raised as it is, it would look as if the caller had been cancelled
        raise RuntimeError("cancelled from inside")
    return task.result()


async def stop(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end, `GRACE_S` at most."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # an error in vain isn't news
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_S)


@contextlib.contextmanager
def attributed(kind: type[RolloutError], where: str) -> Generator[None]:
    """Turn errors that aren't of the tree into `kind`, saying where they came from."""
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        raise kind(f"{where} raised {type(error).__name__}: {error}") from error
