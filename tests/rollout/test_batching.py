"""Laws of continuous batching: what is computed once, when a sample ends, and how much runs at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.serving import (
    F64,
    mismatch,
    play_groups,
    policy_of,
    request_of,
    run,
)
from tests.toys import toy_tokenizer
from thundersyncrl.records import FinishReason
from thundersyncrl.rollout.embedded import EmbeddedEngine
from thundersyncrl.rollout.engine import Sample


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: a second thread only waits
    yield
    torch.set_num_threads(threads)


def test_the_groups_prompt_is_computed_once() -> None:
    async def body(engine: EmbeddedEngine) -> None:
        prompt = range(40, 90)
        requests = [request_of(prompt, id=str(i), seed=i, shared_prefix="g") for i in range(6)]
        await asyncio.gather(*(engine.sample(r) for r in requests))
        stats = engine.stats
        assert (stats.num_tokens_prefilled, stats.num_tokens_shared) == (50, 250)
        assert stats.num_tokens_sampled == 6 * 12
        # the first token of each comes from the prompt's hidden state, so there is one forward less than tokens
        assert stats.num_decode_steps <= 12

    run(policy_of(), body)


def test_a_turn_computes_only_its_new_tokens() -> None:
    async def body(engine: EmbeddedEngine) -> None:
        first = await engine.sample(request_of(range(30), session="s"))
        history = (*range(30), *first.token_ids, 7, 8, 9)
        await engine.sample(request_of(history, id="r2", session="s"))
        stats = engine.stats
        # the last sampled token was never an input of the first turn
        assert (stats.num_tokens_reused, stats.num_tokens_prefilled) == (30 + 11, 30 + 1 + 3)

    run(policy_of(), body)


def test_a_contradicting_prompt_is_computed_anew_and_counted() -> None:
    policy = policy_of()
    drifted = (*range(5), 77, *range(6, 30), 1, 2)

    async def body(engine: EmbeddedEngine) -> Sample:
        await engine.sample(request_of(range(30), session="s"))
        sample = await engine.sample(request_of(drifted, id="r2", session="s"))
        assert (engine.stats.num_mismatched, engine.stats.num_tokens_reused) == (1, 5)
        return sample

    assert mismatch(policy, drifted, run(policy, body)) < 1e-10


def test_a_released_session_holds_nothing() -> None:
    async def body(engine: EmbeddedEngine) -> int:
        await engine.sample(request_of(range(30), session="s"))
        engine.release("s")
        await engine.sample(request_of(range(40), id="r2", session="s"))
        return engine.stats.num_tokens_reused

    assert run(policy_of(), body) == 0


def test_a_stop_token_ends_the_sample_and_is_part_of_it() -> None:
    policy = policy_of()

    async def body(engine: EmbeddedEngine) -> tuple[Sample, Sample]:
        free = await engine.sample(request_of(range(9)))
        stop = free.token_ids[4]
        return free, await engine.sample(request_of(range(9), id="r2", stop_ids=frozenset({stop})))

    free, stopped = run(policy, body)
    end = free.token_ids.index(free.token_ids[4]) + 1
    assert (stopped.token_ids, stopped.finish) == (free.token_ids[:end], FinishReason.STOP)
    assert free.finish is FinishReason.LENGTH


def test_a_stop_string_may_cross_tokens_and_the_token_that_completes_it_is_the_last() -> None:
    tokenizer = toy_tokenizer()
    policy = policy_of()

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids))

    async def body(engine: EmbeddedEngine) -> tuple[Sample, Sample]:
        free = await engine.sample(request_of(range(9), max_new_tokens=60))
        # the end of one token and the begin of the next, late enough that the search window has moved
        pieces = [decode([token]) for token in free.token_ids]
        at = next(i for i in range(50, 59) if "\ufffd" not in pieces[i] + pieces[i + 1])
        stop = pieces[at][-1] + pieces[at + 1][0]
        request = request_of(range(9), id="r2", max_new_tokens=60, stop_strings=("never there", stop))
        return free, await engine.sample(request)

    free, stopped = run(policy, body, decode=decode)
    assert stopped.finish is FinishReason.STOP
    num = len(stopped.token_ids)
    assert stopped.token_ids == free.token_ids[:num]
    assert num <= 60


def test_a_waiting_request_can_be_cancelled() -> None:
    async def body(engine: EmbeddedEngine) -> tuple[Sample, Sample]:
        first = asyncio.create_task(engine.sample(request_of(range(9), id="a", max_new_tokens=60)))
        second = asyncio.create_task(engine.sample(request_of(range(9), id="b")))
        await asyncio.sleep(0)
        engine.cancel("b")
        return await first, await second

    first, second = run(policy_of(), body, max_concurrent=1)
    assert len(first.token_ids) == 60
    assert (second.token_ids, second.finish) == ((), FinishReason.CANCELLED)


def test_the_part_of_a_cancelled_sample_is_the_begin_of_the_whole() -> None:
    policy = policy_of()

    async def body(engine: EmbeddedEngine) -> tuple[Sample, Sample]:
        whole = await engine.sample(request_of(range(9), max_new_tokens=400))
        task = asyncio.create_task(engine.sample(request_of(range(9), id="b", max_new_tokens=400)))
        while engine.stats.num_tokens_sampled < 405:
            await asyncio.sleep(0.001)
        engine.cancel("b")
        return whole, await task

    whole, part = run(policy, body)
    num = len(part.token_ids)
    assert 5 <= num < 400
    assert part.token_ids == whole.token_ids[:num]
    assert part.finish is FinishReason.CANCELLED


def test_no_more_run_at_once_than_allowed() -> None:
    seen: list[int] = []

    async def body(engine: EmbeddedEngine) -> None:
        run_once = engine.run_once

        def watched() -> None:
            run_once()
            seen.append(engine.stats.num_running)

        engine.run_once = watched  # pyright: ignore
        await play_groups(engine)

    run(policy_of(), body, max_concurrent=3)
    assert max(seen) == 3


@pytest.mark.parametrize("workload", range(4))
def test_many_idle_sessions_never_block_and_the_cache_keeps_its_limit(workload: int) -> None:
    """Random lengths, turns, groups and pauses in a cache that holds about four sequences."""
    policy, rng = policy_of("llama", F64), random.Random(workload)

    async def trajectory(engine: EmbeddedEngine, name: int) -> float:
        group = name % 4
        history = tuple(range(group, group + 20 + 10 * group))
        worst = 0.0
        for turn in range(rng.randint(1, 4)):
            request = request_of(
                history,
                id=f"{name}.{turn}",
                session=str(name),
                seed=name,
                max_new_tokens=rng.randint(1, 30),
                shared_prefix=f"g{group}" if group else "",
            )
            sample = await engine.sample(request)
            worst = max(worst, mismatch(policy, history, sample))
            history = (*history, *sample.token_ids, *(rng.randrange(300) for _ in range(rng.randint(1, 20))))
            await asyncio.sleep(rng.random() * 0.01)
        if rng.random() < 0.5:
            engine.release(str(name))
        return worst

    async def body(engine: EmbeddedEngine) -> None:
        worst = await asyncio.gather(*(trajectory(engine, name) for name in range(24)))
        assert max(worst) < 1e-10
        assert engine.stats.peak_cache_tokens <= 700
        assert engine.stats.num_evicted > 0

    run(policy, body, cache_tokens=700, max_concurrent=6)
