"""The same request gives the same sample, whatever else the engine does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
import torch

from tests.serving import (
    Story,
    play,
    play_groups,
    policy_of,
    request_of,
    run,
    tokens_of,
)
from thundersyncrl.rollout import batching
from thundersyncrl.rollout.embedded import EmbeddedEngine


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: a second thread only waits
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone() -> list[Story]:
    """Every trajectory of the three groups, played with nobody else in the engine, nothing shared."""
    policy = policy_of()

    async def body(engine: EmbeddedEngine) -> list[Story]:
        return [await play(engine, g, m, shared_prefix="") for g in range(3) for m in range(4)]

    return run(policy, body)


def test_samples_are_the_same_in_a_crowd(alone: list[Story]) -> None:
    assert tokens_of(run(policy_of(), play_groups)) == tokens_of(alone)


def test_samples_are_the_same_seven_at_a_time(alone: list[Story]) -> None:
    assert tokens_of(run(policy_of(), play_groups, max_concurrent=7)) == tokens_of(alone)


@pytest.mark.parametrize("order_seed", range(3))
def test_samples_are_the_same_in_any_order_of_arrival(alone: list[Story], order_seed: int) -> None:
    async def body(engine: EmbeddedEngine) -> list[Story]:
        who = [(g, m) for g in range(3) for m in range(4)]
        rng = random.Random(order_seed)
        shuffled = rng.sample(who, len(who))

        async def late(group: int, member: int) -> Story:
            await asyncio.sleep(rng.random() * 0.05)
            return await play(engine, group, member)

        stories = dict(zip(shuffled, await asyncio.gather(*(late(*w) for w in shuffled)), strict=True))
        return [stories[w] for w in who]

    assert tokens_of(run(policy_of(), body)) == tokens_of(alone)


def test_samples_are_the_same_after_eviction(alone: list[Story]) -> None:
    async def body(engine: EmbeddedEngine) -> list[Story]:
        stories = await play_groups(engine)
        assert engine.stats.num_evicted > 0
        assert engine.stats.peak_cache_tokens <= 400
        return stories

    assert tokens_of(run(policy_of(), body, cache_tokens=400)) == tokens_of(alone)


def test_samples_are_the_same_when_prompts_are_prefilled_bit_by_bit(
    alone: list[Story], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "PREFILL_TOKENS", 5)

    async def body(engine: EmbeddedEngine) -> list[Story]:
        stories = await play_groups(engine)
        assert engine.stats.num_slices >= engine.stats.num_tokens_prefilled / 5
        return stories

    assert tokens_of(run(policy_of(), body)) == tokens_of(alone)


def test_the_seed_reaches_the_sampler() -> None:
    """Case H-35: the same seed repeats, another differs, and turns of one seed don't repeat their noise."""

    async def body(engine: EmbeddedEngine) -> list[tuple[int, ...]]:
        requests = [request_of(range(9), id=str(i), seed=seed) for i, seed in enumerate((1, 1, 2, -3, 2**65))]
        return [(await engine.sample(r)).token_ids for r in requests]

    first, again, *others = run(policy_of(), body)
    assert first == again
    assert len({first, *others}) == 4
