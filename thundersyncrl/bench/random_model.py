"""A small random model and a tokenizer in a folder, so that worker processes load them as they load any model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Of a Qwen3 with heads of at most 64, half as many of them for keys and values, and an MLP three times as wide."""

    layers: int = 4
    width: int = 256


def save_random_model(folder: Path, size: ModelSize, *, context_tokens: int, seed: int = 0) -> int:
    """Save a random model with a byte-level tokenizer and ChatML; return its number of parameters.

    Args:
        folder: made if it isn't there.
        size: of the model.
        context_tokens: positions that it must have.
        seed: of the weights; torch's global random state is kept.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    head_dim = min(64, size.width // 2)
    heads = size.width // head_dim
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_dim,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def byte_tokenizer():
    """Return a tokenizer of one token per byte with ChatML's control tokens, 260 in all."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    core.add_special_tokens([AddedToken(control, special=True, normalized=False) for control in controls])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, pad_token="<|pad|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
