from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.learner.builders import VOCABULARY, policy_of
from tests.toys import tiny_model, toy_tokenizer
from thundersyncrl.config import LoraConfig, ModelConfig
from thundersyncrl.errors import ConfigError, UnsupportedModelError
from thundersyncrl.learner.attention import PrefixPlan
from thundersyncrl.learner.policy import Policy, load_policy, make_policy

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def causal(config_class: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, config_class)(**{**SIZES, **settings})
    return AutoModelForCausalLM.from_config(config)


def encoder_decoder() -> nn.Module:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def recurrent() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=4, expand=2
    )
    return transformers.MambaForCausalLM(config)


UNSUPPORTED = {
    "sliding window": (lambda: causal("MistralConfig", sliding_window=8), "sliding window of 8"),
    "mixture of experts": (
        lambda: causal("MixtralConfig", num_local_experts=2, num_experts_per_tok=1, sliding_window=None),
        "mixture of experts",
    ),
    "many experts": (
        lambda: causal("Qwen3MoeConfig", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8),
        "mixture of experts",
    ),
    "layers in turn": (lambda: causal("Gemma3TextConfig"), "sliding_attention"),
    "soft-capped": (lambda: causal("Gemma2Config"), "sliding_attention|soft-capped"),
    "encoder-decoder": (encoder_decoder, "encoder-decoder"),
    "recurrent": (recurrent, "MambaForCausalLM"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_cannot_be_cut_exactly_is_refused_by_name_with_the_reason(kind: str) -> None:
    build, reason = UNSUPPORTED[kind]
    model = build()
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        make_policy(model)
    assert type(model).__name__ in str(refusal.value)
    assert "Qwen3" in str(refusal.value)


def test_state_outside_attention_is_found_by_cutting() -> None:
    """No config field tells of it: each hidden state takes in the mean of those before it."""
    model = tiny_model(vocab_size=VOCABULARY)

    def leak(module: nn.Module, inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        counts = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[None, :, None]
        mixed = hidden + hidden.cumsum(1) / counts
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    model.model.layers[0].register_forward_hook(leak)
    with pytest.raises(UnsupportedModelError, match="can't be streamed exactly"):
        make_policy(model)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_supported_families_are_accepted(family: Any) -> None:
    assert make_policy(tiny_model(family, vocab_size=VOCABULARY)).vocab_size == VOCABULARY


def test_a_window_that_is_off_is_no_window() -> None:
    make_policy(causal("MistralConfig", sliding_window=None))
    make_policy(causal("Qwen2Config", sliding_window=8, use_sliding_window=False))


def test_float64_norms_do_not_round_to_float32() -> None:
    """transformers' own would leave 1e-7 here."""
    policy = policy_of("qwen3")
    norms = [m for m in policy.model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert len(norms) == 2 * 4 + 1
    hidden = torch.randn(5, norms[-1].weight.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for norm in (m for m in norms if m.weight.shape[0] == hidden.shape[1]):
        exact = norm.weight * hidden / (hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        torch.testing.assert_close(norm(hidden), exact, rtol=1e-14, atol=1e-14)


def test_bfloat16_keeps_float32_masters_and_scores_in_float32() -> None:
    policy = policy_of(dtype=torch.bfloat16)
    assert {p.dtype for p in policy.trained.values()} == {torch.float32}
    hidden = policy.hidden(torch.tensor([[1, 2, 3]]), torch.arange(3)[None], PrefixPlan())
    assert policy.logits(hidden).dtype is torch.float32
    exact = policy_of(dtype=torch.float32).hidden(torch.tensor([[1, 2, 3]]), torch.arange(3)[None], PrefixPlan())
    assert 1e-6 < float((hidden - exact).detach().abs().max()) < 0.3


def test_adapters_are_all_that_is_trained_and_come_from_the_seed() -> None:
    def adapters(seed: int) -> dict[str, Tensor]:
        model = tiny_model(vocab_size=VOCABULARY)
        trained = make_policy(model, lora=LoraConfig(rank=2, targets=("q_proj",)), seed=seed).trained
        return {name: p.detach() for name, p in trained.items()}

    first, again, other = adapters(0), adapters(0), adapters(1)
    assert len(first) == 2 * 2
    assert all("lora_" in name and "q_proj" in name for name in first)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_making_adapters_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_policy(tiny_model(vocab_size=VOCABULARY), lora=LoraConfig(rank=2), seed=3)
    assert torch.equal(torch.rand(3), expected)


def test_dropout_is_off() -> None:
    """Batch and stream would draw different masks."""
    config = transformers.LlamaConfig(**SIZES, attention_dropout=0.5)
    policy = make_policy(transformers.LlamaForCausalLM(config))

    def hidden() -> Tensor:
        return policy.hidden(torch.tensor([[1, 2, 3]]), torch.arange(3)[None], PrefixPlan())

    assert not policy.model.training
    assert torch.equal(hidden(), hidden())


def test_the_digest_tells_weights_apart() -> None:
    policy: Policy = policy_of()
    before = policy.digest()
    assert before == policy.digest() == policy_of().digest()
    with torch.no_grad():
        next(iter(policy.trained.values())).view(-1)[0] += 1e-12
    assert policy.digest() != before


@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_folder_loads_as_the_model_it_holds(train: Any, tmp_path: Path) -> None:
    model = tiny_model(vocab_size=300)
    model.save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    policy, tokenizer = load_policy(ModelConfig(path=str(tmp_path), dtype="float64", train=train))
    ids = torch.tensor([[1, 2, 3, 4]])
    got = policy.logits(policy.hidden(ids, torch.arange(4)[None], PrefixPlan()))
    expected = model.double()(input_ids=ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # its norms round to float32
    assert tokenizer.pad_token == "<|pad|>"
    assert all("lora_" in name for name in policy.trained) == (train == "lora")


def test_a_model_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_policy(ModelConfig(path=str(tmp_path / "nothing")))


def test_a_model_that_takes_images_is_refused():
    """Case H-34: images would reach the engine but not the training pass."""
    model = tiny_model("llama")
    model.config.vision_config = {"hidden_size": 8}
    with pytest.raises(UnsupportedModelError, match="images"):
        make_policy(model)
