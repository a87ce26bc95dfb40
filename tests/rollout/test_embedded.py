"""Laws of the embedded engine as a process part: versions, refusals, and who is woken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.serving import (
    F32,
    engine_of,
    policy_of,
    request_of,
    run,
    serving,
)
from thundersyncrl.errors import ConfigError, EngineError, NumericsError, PublishError
from thundersyncrl.rollout.embedded import EmbeddedEngine


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: a second thread only waits
    yield
    torch.set_num_threads(threads)


def test_the_first_publish_may_be_any_version_and_none_is_live_before() -> None:
    policy = policy_of()

    async def main() -> None:
        async with serving(engine_of(policy)) as engine:
            assert engine.version == -1
            with pytest.raises(EngineError, match="publish"):
                await engine.sample(request_of(range(5)))
            assert (await engine.publish(41)).version == 41
            assert (await engine.sample(request_of(range(5)))).version == 41
            with pytest.raises(PublishError, match="expected version 42"):
                await engine.publish(43)

    asyncio.run(main())


def test_stop_strings_need_a_way_to_decode() -> None:
    with pytest.raises(EngineError, match="decode"):
        run(policy_of(), lambda engine: engine.sample(request_of(range(9), stop_strings=("x",))))


def test_a_cancelled_task_leaves_nothing_behind() -> None:
    async def body(engine: EmbeddedEngine) -> None:
        task = asyncio.create_task(engine.sample(request_of(range(9), max_new_tokens=400)))
        while engine.stats.num_tokens_sampled < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await engine.publish(1)).version == 1
        assert engine.stats.num_running == 0
        assert len((await engine.sample(request_of(range(9)))).token_ids) == 12

    run(policy_of(), body)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompt_ids": (1,) * 200, "max_new_tokens": 150}, r"256 cache tokens, got 200 \+ 150"),
        ({"prompt_ids": (1, 300)}, "1 to 300"),
        ({"prompt_ids": (1, -1)}, "-1 to 1"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop_strings": ("",)}, "non-empty"),
    ],
)
def test_what_can_never_be_served_is_refused_with_numbers(change: dict[str, Any], problem: str) -> None:
    request = replace(request_of(range(9)), **change)
    with pytest.raises(EngineError, match=problem):
        run(policy_of(), lambda engine: engine.sample(request), cache_tokens=256)


def test_a_session_has_one_live_request() -> None:
    async def body(engine: EmbeddedEngine) -> None:
        both = [engine.sample(request_of(range(9), id=name, session="s")) for name in "ab"]
        await asyncio.gather(*both)

    with pytest.raises(EngineError, match="one live request per session"):
        run(policy_of(), body)


def test_a_context_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"2048.*got 4096"):
        engine_of(policy_of(), context_tokens=4096)


def test_work_is_announced() -> None:
    calls: list[str] = []

    async def main() -> None:
        engine = engine_of(policy_of(), on_work=lambda: calls.append("work"))
        assert not engine.has_work
        publishing = asyncio.create_task(engine.publish(0))
        await asyncio.sleep(0)
        assert (len(calls), engine.has_work) == (1, True)
        engine.run_once()
        await publishing
        assert not engine.has_work
        sampling = asyncio.create_task(engine.sample(request_of(range(5), max_new_tokens=2)))
        await asyncio.sleep(0)
        assert (len(calls), engine.has_work) == (2, True)
        engine.run_once()
        assert engine.has_work
        engine.run_once()
        assert not engine.has_work
        assert len((await sampling).token_ids) == 2
        engine.run_once()  # nothing to do

    asyncio.run(main())


def test_weights_that_are_not_finite_end_the_run_and_nobody_waits_for_ever() -> None:
    policy = policy_of(dtype=F32)
    answers: list[Any] = []

    async def body(engine: EmbeddedEngine) -> None:
        with torch.no_grad():
            next(iter(policy.trained.values())).fill_(float("nan"))
        await engine.publish(1)
        requests = [request_of(range(9), id=str(i)) for i in range(3)]
        answers.extend(await asyncio.gather(*(engine.sample(r) for r in requests), return_exceptions=True))

    with pytest.raises(NumericsError, match="diverged"):
        run(policy, body)
    assert [type(answer) for answer in answers] == [EngineError] * 3
