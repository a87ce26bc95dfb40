"""Small real parts for tests: a byte-level BPE tokenizer with ChatML tokens, and random models of each family."""

from __future__ import annotations

from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MERGES = (
    *(("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")),
    *(("`", "`"), ("``", "`"), ("o", "k"), ("u", "s"), ("e", "r"), ("us", "er"), ("Ġ", "t"), ("i", "n"), ("in", "g")),
)
"""In order of rank. "hello" is one token, and so are "he" and "llo": sampled ids need not be what encoding gives."""


def toy_tokenizer(
    *, pad: bool = True, eos: bool = True, bos: bool = False, chat_template: bool | str = True
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of less than 300 tokens with ChatML control tokens.

    Args:
        pad: give it `<|pad|>` as pad token.
        eos: give it `<|im_end|>` as eos token.
        bos: give it `<|im_start|>` as bos token.
        chat_template: True for ChatML, False for none, or a template's own text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(left + right for left, right in MERGES)]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(MERGES)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(["<|pad|>"] if pad else [])]
    core.add_special_tokens([AddedToken(control, special=True, normalized=False) for control in controls])
    named: dict[str, Any] = {}
    if pad:
        named["pad_token"] = "<|pad|>"
    if eos:
        named["eos_token"] = "<|im_end|>"
    if bos:
        named["bos_token"] = "<|im_start|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **named)
    if chat_template:
        tokenizer.chat_template = CHATML if chat_template is True else chat_template
    return tokenizer


def tiny_model(
    family: Literal["llama", "qwen2", "qwen3"] = "llama",
    *,
    tied: bool = True,
    vocab_size: int = 300,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Any:
    """Return a random causal LM in eval mode; the same seed gives the same weights, and global random state is kept."""
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,  # large enough that attention and logits are far from uniform
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen2":
        del settings["head_dim"]  # Qwen2 derives it
    kinds = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = kinds[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # transformers starts biases at zero, which would hide a lost one
                    parameter.normal_(std=0.1)
    return model.to(dtype).eval()
