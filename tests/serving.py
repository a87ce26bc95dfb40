"""Engines under test: a thread that gives them slices, small policies, and trajectories to play."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tests.toys import tiny_model
from thundersyncrl.config import LoraConfig
from thundersyncrl.learner.attention import PrefixPlan
from thundersyncrl.learner.policy import Policy, make_policy
from thundersyncrl.rollout.embedded import EmbeddedEngine
from thundersyncrl.rollout.engine import Sample, SampleRequest
from thundersyncrl.rollout.versions import VersionedEngine

Served = TypeVar("Served", EmbeddedEngine, VersionedEngine)
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@asynccontextmanager
async def serving(engine: Served) -> AsyncIterator[Served]:
    """Run slices while the body runs; an error of a slice is raised at the end of the body."""
    loop, wake = asyncio.get_running_loop(), asyncio.Event()
    engine.on_work = lambda: loop.call_soon_threadsafe(wake.set)
    with ThreadPoolExecutor(max_workers=1) as thread:

        async def serve() -> None:
            while True:
                wake.clear()
                while engine.has_work:
                    await loop.run_in_executor(thread, engine.run_once)
                await wake.wait()

        server = asyncio.create_task(serve())
        try:
            async with asyncio.timeout(60):
                yield engine
        finally:
            await engine.close()
            if not server.done():
                server.cancel()
            await asyncio.wait({server})
        if not server.cancelled():
            server.result()


def policy_of(family: Any = "llama", dtype: torch.dtype = F64, *, lora: bool = False, seed: int = 0) -> Policy:
    stored = F64 if dtype is F64 else F32
    policy = make_policy(
        tiny_model(family, dtype=stored, seed=seed), dtype=dtype, lora=LoraConfig(rank=4) if lora else None
    )
    if lora:
        shake(policy, seed=seed + 1)  # PEFT starts with adapters that do nothing
    return policy


@torch.no_grad()
def shake(policy: Policy, *, seed: int, scale: float = 0.05) -> None:
    """Change every trained parameter, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.trained.values():
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=F64).to(parameter.dtype) * scale)


def engine_of(policy: Policy, **settings: Any) -> EmbeddedEngine:
    return EmbeddedEngine(policy, **{"context_tokens": 512, "max_concurrent": 16, "cache_tokens": 16384, **settings})


@asynccontextmanager
async def live(policy: Policy, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    async with serving(engine_of(policy, **settings)) as engine:
        await engine.publish(0)
        yield engine


def run(policy: Policy, body: Callable[[EmbeddedEngine], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with live(policy, **settings) as engine:
            return await body(engine)

    return asyncio.run(main())


def request_of(prompt_ids: Sequence[int], **settings: Any) -> SampleRequest:
    defaults: dict[str, Any] = {"id": "r", "max_new_tokens": 12, "temperature": 1.0, "seed": 0}
    defaults["session"] = settings.get("id", "r")
    return SampleRequest(prompt_ids=tuple(prompt_ids), **{**defaults, **settings})


@torch.no_grad()
def learner_logprobs(policy: Policy, prompt_ids: Sequence[int], sample: Sample, temperature: float) -> torch.Tensor:
    """The learner's log-probs of a sample, from one forward over the whole sequence."""
    ids = torch.tensor([[*prompt_ids, *sample.token_ids]])
    positions = torch.arange(ids.shape[1])[None]
    logits = policy.logits(policy.hidden(ids, positions, PrefixPlan()))[0]
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    scored = logprobs[len(prompt_ids) - 1 : -1]
    return scored.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]


def mismatch(policy: Policy, prompt_ids: Sequence[int], sample: Sample, temperature: float = 1.0) -> float:
    expected = learner_logprobs(policy, prompt_ids, sample, temperature)
    return float((torch.tensor(sample.logprobs, dtype=F64) - expected).abs().max())


@dataclass(frozen=True, kw_only=True)
class Story:
    """What one trajectory asked for and got, turn by turn."""

    prompts: tuple[tuple[int, ...], ...]
    samples: tuple[Sample, ...]


async def play(
    engine: EmbeddedEngine, group: int, member: int, *, turns: int = 3, temperature: float = 1.0, **settings: Any
) -> Story:
    """Play turns of different lengths; observations differ by member."""
    history = tuple(range(10 + group, 30 + 2 * group))
    prompts, samples = list[tuple[int, ...]](), list[Sample]()
    for turn in range(turns):
        name = f"{group}.{member}"
        request = request_of(
            history,
            id=f"{name}.{turn}",
            session=name,
            max_new_tokens=5 + 3 * member,
            temperature=temperature,
            seed=100 * group + member,
            **{"shared_prefix": f"g{group}", **settings},
        )
        sample = await engine.sample(request)
        prompts.append(history)
        samples.append(sample)
        history = (*history, *sample.token_ids, *range(50 + turn, 57 + turn + member))
    engine.release(f"{group}.{member}")
    return Story(prompts=tuple(prompts), samples=tuple(samples))


async def play_groups(engine: EmbeddedEngine, **settings: Any) -> list[Story]:
    return list(await asyncio.gather(*(play(engine, g, m, **settings) for g in range(3) for m in range(4))))


def worst_mismatch(policy: Policy, stories: Sequence[Story], temperature: float = 1.0) -> float:
    return max(
        mismatch(policy, prompt, sample, temperature)
        for story in stories
        for prompt, sample in zip(story.prompts, story.samples, strict=True)
    )


def tokens_of(stories: Sequence[Story]) -> list[tuple[int, ...]]:
    return [sample.token_ids for story in stories for sample in story.samples]
