"""The engine computes what the learner computes, from the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from tests.serving import (
    BF16,
    F32,
    F64,
    Story,
    mismatch,
    play,
    play_groups,
    policy_of,
    request_of,
    run,
    shake,
    tokens_of,
    worst_mismatch,
)
from thundersyncrl.config import ModelConfig
from thundersyncrl.learner.attention import PrefixPlan
from thundersyncrl.learner.policy import load_policy
from thundersyncrl.records import Receipt
from thundersyncrl.rollout.decoder import Decoder
from thundersyncrl.rollout.embedded import EmbeddedEngine
from thundersyncrl.rollout.engine import Sample


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: a second thread only waits
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-10), (F32, 1e-5)], ids=["f64", "f32"])
def test_logprobs_equal_the_learners_over_turns_and_groups(
    family: str, lora: bool, dtype: torch.dtype, bound: float
) -> None:
    policy = policy_of(family, dtype, lora=lora)
    assert worst_mismatch(policy, run(policy, play_groups)) < bound


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.6, 1.0, 1.4])
def test_logprobs_are_those_of_the_distribution_sampled_from(temperature: float) -> None:
    """Case H-10, end to end; at temperature 0 they are those of temperature 1."""
    policy = policy_of()
    stories = run(policy, lambda engine: play_groups(engine, temperature=temperature))
    assert worst_mismatch(policy, stories, temperature) < 1e-10


def test_greedy_takes_the_learners_largest_logit() -> None:
    policy = policy_of()
    sample = run(policy, lambda engine: engine.sample(request_of(range(9), temperature=0.0)))
    history = list(range(9))
    for token in sample.token_ids:
        ids = torch.tensor([history])
        with torch.no_grad():
            logits = policy.logits(policy.hidden(ids, torch.arange(len(history))[None], PrefixPlan()))
        assert token == int(logits[0, -1].argmax())
        history.append(token)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_bfloat16_stays_close_and_never_above_zero(lora: bool) -> None:
    """Case H-33: low precision is in the model's arithmetic only, not in the softmax."""
    policy = policy_of("qwen3", BF16, lora=lora)
    stories = run(policy, play_groups)
    assert worst_mismatch(policy, stories) < 0.3
    assert all(logprob <= 0 for story in stories for sample in story.samples for logprob in sample.logprobs)


@pytest.mark.model
def test_logprobs_of_a_real_model_equal_the_learners() -> None:
    policy, tokenizer = load_policy(ModelConfig(train="full"))
    prompt = tokenizer.encode("List the files of this folder, then count the lines of each.")

    async def body(engine: EmbeddedEngine) -> list[Sample]:
        requests = [request_of(prompt, id=str(i), seed=i, shared_prefix="g") for i in range(3)]
        return list(await asyncio.gather(*(engine.sample(r) for r in requests)))

    samples = run(policy, body)
    assert max(mismatch(policy, prompt, sample) for sample in samples) < 1e-4
    assert len({sample.token_ids for sample in samples}) == 3


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [F64, BF16], ids=["f64", "bf16"])
def test_after_publish_everything_comes_from_the_new_weights(lora: bool, dtype: torch.dtype) -> None:
    """Case H-19: no kept key or value, and no packed weight, crosses versions."""
    policy = policy_of("qwen2", dtype, lora=lora)

    async def body(engine: EmbeddedEngine) -> list[Story]:
        await play_groups(engine)
        await engine.sample(request_of(range(30), session="s"))
        before = engine.stats
        shake(policy, seed=5)
        receipt = await engine.publish(1)
        assert receipt == Receipt(version=1, digest=policy.digest())
        await engine.sample(request_of(range(40), id="r2", session="s"))
        assert engine.stats.num_tokens_reused == before.num_tokens_reused
        # one after another, so that both engines compute in the same shapes and the last bits agree
        return [await play(engine, 0, member) for member in range(3)]

    async def cold_body(engine: EmbeddedEngine) -> list[Story]:
        return [await play(engine, 0, member) for member in range(3)]

    warm, cold = run(policy, body), run(policy, cold_body)
    assert tokens_of(warm) == tokens_of(cold)
    for warm_story, cold_story in zip(warm, cold, strict=True):
        for new, fresh in zip(warm_story.samples, cold_story.samples, strict=True):
            assert new.logprobs == pytest.approx(fresh.logprobs, abs=1e-9 if dtype is F64 else 1e-2)
            assert (new.version, fresh.version) == (1, 0)
    if dtype is F64:
        assert worst_mismatch(policy, warm) < 1e-10


def test_publishing_never_changes_the_base_and_twice_is_once() -> None:
    """Case H-20: adapters are merged into a copy, from the frozen base each time."""
    policy = policy_of("llama", F32, lora=True)
    base = {n: p.detach().clone() for n, p in policy.model.named_parameters() if not p.requires_grad}

    async def body(engine: EmbeddedEngine) -> tuple[Sample, Sample]:
        once = await engine.sample(request_of(range(30)))
        for version in range(1, 101):
            shake(policy, seed=version, scale=0.01)
            await engine.publish(version)
        twice = await engine.sample(request_of(range(30)))
        await engine.publish(101)
        again = await engine.sample(request_of(range(30)))
        assert once != twice
        return twice, again

    twice, again = run(policy, body)
    assert (twice.token_ids, twice.logprobs) == (again.token_ids, again.logprobs)
    fresh = run(policy, lambda engine: engine.sample(request_of(range(30))))
    assert (fresh.token_ids, fresh.logprobs) == (again.token_ids, again.logprobs)
    after = dict(policy.model.named_parameters())
    assert all(torch.equal(after[name], parameter) for name, parameter in base.items())
    assert base


def test_full_weights_are_read_not_copied() -> None:
    policy = policy_of(dtype=F32)
    sampled = Decoder(policy).sampled
    assert (sampled.decoder, sampled.head) == (policy.decoder, policy.head)


def test_adapters_copy_only_the_layers_they_change() -> None:
    policy = policy_of(dtype=F32, lora=True)
    sampled = Decoder(policy).sampled
    own = {name: p.data_ptr() for name, p in policy.decoder.named_parameters()}
    shared = {name: p.data_ptr() for name, p in sampled.decoder.named_parameters()}
    assert shared
    assert all(own[name] == pointer for name, pointer in shared.items())
    assert not any("proj" in name for name in shared)
