"""What every engine keeps, whatever samples its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.serving import serving
from tests.toys import tiny_model
from thundersyncrl.errors import EngineError, PublishError
from thundersyncrl.learner.policy import Policy, make_policy
from thundersyncrl.records import FinishReason
from thundersyncrl.rollout.embedded import EmbeddedEngine
from thundersyncrl.rollout.engine import Engine, SampleRequest
from thundersyncrl.rollout.scripted import Reply, ScriptedEngine
from thundersyncrl.rollout.versions import VersionedEngine

CONTEXT = 1024
REQUEST = SampleRequest(id="r", session="s", prompt_ids=(1, 2, 3), max_new_tokens=4, temperature=1.0, seed=5)
LONG = replace(REQUEST, max_new_tokens=1000)
"""Doesn't end before the test does."""


def scripted_reply(request: SampleRequest, turn: int) -> Reply:
    if request.max_new_tokens > 100:
        return Reply(delay_s=float("inf"))
    return Reply(token_ids=tuple(range(5, 6 + request.max_new_tokens)))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy(tiny_model())


@asynccontextmanager
async def open_scripted(policy: Policy) -> AsyncIterator[Engine]:
    yield ScriptedEngine(scripted_reply, context_tokens=CONTEXT)


@asynccontextmanager
async def open_embedded(policy: Policy) -> AsyncIterator[Engine]:
    async with serving(embedded(policy)) as engine:
        await engine.publish(0)
        yield engine


def embedded(policy: Policy) -> EmbeddedEngine:
    return EmbeddedEngine(policy, context_tokens=CONTEXT, max_concurrent=4, cache_tokens=8192)


@asynccontextmanager
async def open_versioned(policy: Policy) -> AsyncIterator[Engine]:
    async with serving(VersionedEngine(policy, embedded, max_concurrent=4)) as engine:
        await engine.publish(0)
        yield engine


Run = Callable[[Callable[[Engine], Awaitable[Any]]], Any]


@pytest.fixture(params=[open_scripted, open_embedded, open_versioned], ids=["scripted", "embedded", "versioned"])
def run(request: pytest.FixtureRequest, policy: Policy) -> Run:
    """Run a body with an open engine at version 0."""

    def run_body(body: Callable[[Engine], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            async with request.param(policy) as engine:
                return await body(engine)

        return asyncio.run(main())

    return run_body


def test_a_sample_has_one_logprob_per_token_and_the_live_version(run: Run) -> None:
    sample = run(lambda engine: engine.sample(REQUEST))
    assert len(sample.token_ids) == len(sample.logprobs) == 4
    assert all(logprob <= 0 for logprob in sample.logprobs)
    assert (sample.finish, sample.version) == (FinishReason.LENGTH, 0)


def test_a_stop_token_ends_the_sample_and_is_part_of_it(run: Run) -> None:
    sample = run(lambda engine: engine.sample(replace(REQUEST, stop_ids=frozenset(range(300)))))
    assert (len(sample.token_ids), len(sample.logprobs), sample.finish) == (1, 1, FinishReason.STOP)


def test_turns_of_one_session_follow_each_other(run: Run) -> None:
    async def body(engine: Engine) -> list[int]:
        first = await engine.sample(REQUEST)
        longer = (*REQUEST.prompt_ids, *first.token_ids, 9)
        second = await engine.sample(replace(REQUEST, id="r2", prompt_ids=longer, max_new_tokens=2))
        return [len(first.token_ids), len(second.token_ids)]

    assert run(body) == [4, 2]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"max_new_tokens": CONTEXT}, "1024"),
        ({"prompt_ids": (1,) * CONTEXT}, "1024"),
        ({"prompt_ids": ()}, "at least one"),
        ({"max_new_tokens": 0}, "at least one"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_size(run: Run, change: dict[str, Any], problem: str) -> None:
    """Case H-32."""
    with pytest.raises(EngineError, match=problem):
        run(lambda engine: engine.sample(replace(REQUEST, **change)))


def test_prompt_and_budget_may_fill_the_context(run: Run) -> None:
    sample = run(lambda engine: engine.sample(replace(REQUEST, prompt_ids=(1,) * (CONTEXT - 4))))
    assert len(sample.token_ids) == 4


async def while_live(engine: Engine, then: Callable[[], Awaitable[Any] | None]) -> Any:
    """Return the sample of a long request that is cancelled after `then` ran."""
    task = asyncio.create_task(engine.sample(LONG))
    await asyncio.sleep(0.05)
    try:
        waiting = then()
        if waiting is not None:
            await waiting
    finally:
        engine.cancel(LONG.id)
        sample = await task
    return sample


def test_a_cancelled_request_returns_what_was_sampled(run: Run) -> None:
    sample = run(lambda engine: while_live(engine, lambda: None))
    assert sample.finish is FinishReason.CANCELLED
    assert len(sample.token_ids) == len(sample.logprobs) < LONG.max_new_tokens


def test_the_id_of_an_ended_request_may_be_used_again(run: Run) -> None:
    async def body(engine: Engine) -> Any:
        await while_live(engine, lambda: None)
        engine.release(LONG.session)
        return await engine.sample(REQUEST)

    assert run(body).finish is FinishReason.LENGTH


def test_a_live_id_is_refused(run: Run) -> None:
    with pytest.raises(EngineError, match="live"):
        run(lambda engine: while_live(engine, lambda: engine.sample(replace(LONG, session="other"))))


def test_unknown_ids_and_sessions_are_ignored(run: Run) -> None:
    async def body(engine: Engine) -> Any:
        engine.cancel("nobody")
        engine.release("nothing")
        return await engine.sample(REQUEST)

    assert run(body).version == 0


def test_versions_go_up_by_one(run: Run) -> None:
    async def body(engine: Engine) -> tuple[int, ...]:
        receipts = [await engine.publish(1), await engine.publish(2)]
        sample = await engine.sample(REQUEST)
        return (*(receipt.version for receipt in receipts), engine.version, sample.version)

    assert run(body) == (1, 2, 2, 2)


@pytest.mark.parametrize("version", [0, 2, -1])
def test_another_version_than_the_next_is_refused(run: Run, version: int) -> None:
    with pytest.raises(PublishError, match="expected version 1"):
        run(lambda engine: engine.publish(version))


@pytest.mark.parametrize("run", [open_scripted, open_embedded], ids=["scripted", "embedded"], indirect=True)
def test_an_engine_of_one_version_refuses_to_publish_while_a_request_is_live(run: Run) -> None:
    with pytest.raises(PublishError, match=r"live requests.*r"):
        run(lambda engine: while_live(engine, lambda: engine.publish(1)))


def test_close_is_idempotent_and_final(run: Run) -> None:
    async def body(engine: Engine) -> None:
        await engine.close()
        await engine.close()
        await engine.sample(REQUEST)

    with pytest.raises(EngineError, match="close"):
        run(body)
