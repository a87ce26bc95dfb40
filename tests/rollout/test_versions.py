"""Laws of the engine of an asynchronous run: one version per trajectory, whatever is published meanwhile."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from tests.serving import engine_of, mismatch, play, policy_of, request_of, serving, shake, tokens_of
from tests.serving import live as live_engine
from thundersyncrl.errors import ConfigError, EngineError, PublishError
from thundersyncrl.learner.policy import Policy
from thundersyncrl.rollout.embedded import EmbeddedEngine
from thundersyncrl.rollout.versions import VersionedEngine


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: a second thread only waits
    yield
    torch.set_num_threads(threads)


def versioned(policy: Policy, *, max_concurrent: int = 16, **settings: Any) -> VersionedEngine:
    return VersionedEngine(policy, lambda own: engine_of(own, **settings), max_concurrent=max_concurrent)


@asynccontextmanager
async def opened(policy: Policy, **settings: Any) -> AsyncIterator[VersionedEngine]:
    async with serving(versioned(policy, **settings)) as engine:
        await engine.publish(0)
        yield engine


def run(policy: Policy, body: Callable[[VersionedEngine], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with opened(policy, **settings) as engine:
            return await body(engine)

    return asyncio.run(main())


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_trajectory_ends_under_the_version_it_began_with(lora: bool) -> None:
    policy = policy_of(lora=lora)
    before = copy.deepcopy(policy)

    async def alone() -> Any:
        async with live_engine(before) as engine:
            return await play(engine, 0, 1)

    async def body(engine: VersionedEngine) -> Any:
        old = asyncio.create_task(play(engine, 0, 1))  # type: ignore[arg-type]
        await asyncio.sleep(0)  # its first request is in
        for version in (1, 2):
            shake(policy, seed=version)
            receipt = await engine.publish(version)
            assert receipt.digest == policy.digest()
        return await old, await play(engine, 0, 2)  # type: ignore[arg-type]

    old, new = run(policy, body)
    assert {s.version for s in old.samples} == {0}
    assert {s.version for s in new.samples} == {2}
    assert tokens_of([old]) == tokens_of([asyncio.run(alone())])
    for story, weights in ((old, before), (new, policy)):
        worst = max(mismatch(weights, p, s) for p, s in zip(story.prompts, story.samples, strict=True))
        assert worst < 1e-10


def test_the_sources_weights_may_change_while_trajectories_are_sampled() -> None:
    policy = policy_of()
    before = copy.deepcopy(policy)

    async def body(engine: VersionedEngine) -> Any:
        task = asyncio.create_task(engine.sample(request_of(range(9), max_new_tokens=40)))
        await asyncio.sleep(0)
        shake(policy, seed=3)
        return await task

    assert mismatch(before, range(9), run(policy, body)) < 1e-10


def test_a_version_goes_with_its_last_trajectory_and_its_memory_is_used_again() -> None:
    policy = policy_of()

    async def body(engine: VersionedEngine) -> list[tuple[int, ...]]:
        kept = [engine.versions]
        await engine.sample(request_of(range(5), id="a", session="old"))
        for version in (1, 2, 3):
            await engine.publish(version)
            kept.append(engine.versions)  # nobody began under 1 and 2
        engine.release("old")
        await engine.publish(4)
        return [*kept, engine.versions]

    assert run(policy, body) == [(0,), (0, 1), (0, 2), (0, 3), (4,)]


def test_frozen_weights_exist_once() -> None:
    policy = policy_of(lora=True)
    made: list[Policy] = []

    def make(own: Policy) -> Any:
        made.append(own)
        return engine_of(own)

    async def main() -> None:
        async with serving(VersionedEngine(policy, make, max_concurrent=4)) as engine:
            await engine.publish(0)

    asyncio.run(main())
    assert made[0] is policy  # the source, asked for its limits
    source, own = dict(policy.model.named_parameters()), dict(made[1].model.named_parameters())
    assert {n for n in source if own[n] is source[n]} == set(source) - set(policy.trained)
    assert all(own[n].data_ptr() != source[n].data_ptr() for n in policy.trained)


def test_all_versions_together_keep_the_limit_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EmbeddedEngine] = []
    most = 0

    def make(own: Policy) -> EmbeddedEngine:
        made.append(engine_of(own))
        return made[-1]

    async def main() -> list[int]:
        engine = VersionedEngine(policy_of(), make, max_concurrent=3)
        run_once = engine.run_once

        def counted() -> None:
            nonlocal most
            run_once()
            most = max(most, sum(one.stats.num_running for one in made))

        monkeypatch.setattr(engine, "run_once", counted)
        async with serving(engine):
            await engine.publish(0)
            tasks = [_ask(engine, f"old{i}") for i in range(2)]
            await asyncio.sleep(0)
            await engine.publish(1)
            tasks += [_ask(engine, f"new{i}") for i in range(3)]
            return [len(sample.token_ids) for sample in await asyncio.gather(*tasks)]

    assert asyncio.run(main()) == [20] * 5
    assert most == 3


def _ask(engine: VersionedEngine, name: str) -> asyncio.Task[Any]:
    return asyncio.create_task(engine.sample(request_of(range(5), id=name, max_new_tokens=20)))


def test_a_request_of_an_old_version_can_be_cancelled() -> None:
    async def body(engine: VersionedEngine) -> Any:
        task = asyncio.create_task(engine.sample(request_of(range(9), max_new_tokens=400)))
        await asyncio.sleep(0)
        await engine.publish(1)
        engine.cancel("r")
        return await task

    assert run(policy_of(), body).finish == "cancelled"


def test_nothing_is_sampled_before_the_first_version() -> None:
    async def main() -> None:
        async with serving(versioned(policy_of())) as engine:
            assert (engine.version, engine.versions) == (-1, ())
            with pytest.raises(EngineError, match="published version"):
                await engine.sample(request_of(range(5)))

    asyncio.run(main())


def test_no_version_is_published_twice_or_after_the_end() -> None:
    async def body(engine: VersionedEngine) -> None:
        with pytest.raises(PublishError, match="expected version 1"):
            await engine.publish(0)
        await engine.close()
        with pytest.raises(PublishError, match="closed"):
            await engine.publish(1)

    run(policy_of(), body)


def test_a_context_that_the_model_lacks_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="positions"):
        versioned(policy_of(), context_tokens=1 << 20)
