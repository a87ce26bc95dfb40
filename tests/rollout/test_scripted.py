"""The scripted engine keeps the contract of a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from thundersyncrl.errors import EngineError, PublishError
from thundersyncrl.records import FinishReason
from thundersyncrl.rollout.engine import Engine, Sample, SampleRequest
from thundersyncrl.rollout.scripted import Reply, ScriptedEngine, by_turn

REQUEST = SampleRequest(
    id="r", session="s", prompt_ids=(1, 2), max_new_tokens=8, temperature=1.0, seed=0, stop_ids=frozenset({9})
)
FOREVER = float("inf")


def engine_of(reply: Reply, **settings: int) -> ScriptedEngine:
    return ScriptedEngine(lambda request, turn: reply, **settings)


def sample(engine: Engine, request: SampleRequest = REQUEST) -> Sample:
    return asyncio.run(engine.sample(request))


def while_live(engine: ScriptedEngine, then: Callable[[], Awaitable[object] | None]) -> Sample:
    """Return the sample of a request during which `then` ran."""

    async def both() -> Sample:
        task = asyncio.create_task(engine.sample(REQUEST))
        while engine.num_live == 0:
            await asyncio.sleep(0)
        try:
            waiting = then()
            if waiting is not None:
                await waiting
        finally:
            engine.cancel(REQUEST.id)
            result = await task
        return result

    return asyncio.run(both())


def test_a_sample_is_what_the_script_says() -> None:
    engine = engine_of(Reply(token_ids=(5, 9), logprobs=(-0.5, -0.25)), version=3)
    assert sample(engine) == Sample(token_ids=(5, 9), logprobs=(-0.5, -0.25), finish=FinishReason.STOP, version=3)
    assert engine.requests == [REQUEST]


def test_replies_are_found_by_session_and_turn() -> None:
    engine = ScriptedEngine(by_turn({("s", 0): Reply(token_ids=(5,)), ("s", 1): Reply(token_ids=(6,))}))
    assert [sample(engine).token_ids for _ in range(2)] == [(5,), (6,)]
    with pytest.raises(EngineError, match=r"got s turn 2; scripted: s turn 0, s turn 1"):
        sample(engine)
    engine.release("s")
    assert sample(engine).token_ids == (5,)
    assert engine.released == ["s"]


def test_a_sample_ends_after_a_stop_token_and_at_its_budget() -> None:
    engine = engine_of(Reply(token_ids=(5, 9, 6, 7)))
    assert sample(engine).token_ids == (5, 9)
    assert sample(engine).logprobs == (-1.0, -1.0)
    short = sample(engine, replace(REQUEST, max_new_tokens=1))
    assert (short.token_ids, short.finish) == ((5,), FinishReason.LENGTH)


def test_a_request_beyond_the_context_is_refused() -> None:
    engine = engine_of(Reply(token_ids=(5,)), context_tokens=9)
    with pytest.raises(EngineError, match=r"at most 9 tokens, got 2 \+ 8"):
        sample(engine)
    assert sample(engine, replace(REQUEST, max_new_tokens=7)).token_ids == (5,)


@pytest.mark.parametrize("change", [{"prompt_ids": ()}, {"max_new_tokens": 0}])
def test_an_empty_request_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="at least one token each"):
        sample(engine_of(Reply(token_ids=(5,))), replace(REQUEST, **change))


def test_ids_of_live_requests_are_unique() -> None:
    engine = engine_of(Reply(delay_s=FOREVER))
    with pytest.raises(EngineError, match="'r', which is live"):
        while_live(engine, lambda: engine.sample(REQUEST))
    assert engine.num_live == 0


def test_a_cancelled_request_returns_what_was_sampled() -> None:
    engine = engine_of(Reply(token_ids=(5, 6, 7), logprobs=(-1.0, -2.0, -3.0), delay_s=FOREVER, num_when_cancelled=2))
    result = while_live(engine, lambda: engine.cancel("r"))
    assert (result.token_ids, result.logprobs, result.finish) == ((5, 6), (-1.0, -2.0), FinishReason.CANCELLED)
    engine.cancel("nobody")
    assert engine.cancelled == ["r", "r"]


def test_a_version_goes_live_only_in_order_and_only_when_nothing_is_live() -> None:
    engine = engine_of(Reply(delay_s=FOREVER))
    with pytest.raises(PublishError, match="no live requests at publish of version 1, got r"):
        while_live(engine, lambda: engine.publish(1))
    with pytest.raises(PublishError, match="expected version 1, got 2"):
        asyncio.run(engine.publish(2))
    assert engine.version == 0
    receipt = asyncio.run(engine.publish(1))
    assert (receipt.version, engine.version, engine.sessions) == (1, 1, frozenset())


def test_errors_come_after_their_delay_and_leave_nothing_live() -> None:
    engine = engine_of(Reply(error=EngineError("no memory"), delay_s=0.01))
    with pytest.raises(EngineError, match="no memory"):
        sample(engine)
    assert engine.num_live == 0


def test_closing_ends_what_is_live_and_refuses_more() -> None:
    engine = engine_of(Reply(delay_s=FOREVER))
    assert while_live(engine, engine.close).finish is FinishReason.CANCELLED
    asyncio.run(engine.close())
    with pytest.raises(EngineError, match="after close"):
        sample(engine)
