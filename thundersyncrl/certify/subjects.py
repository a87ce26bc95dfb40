"""What is certified: tiny models of the supported families, or a config's model on trajectories that it sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from thundersyncrl.algorithms.estimator import Estimator, RewardDomain, estimator_names, get_estimator
from thundersyncrl.algorithms.weights import choose_normalizer
from thundersyncrl.certify.cases import Batch, RewardKind, drawn_batch, tiny_batch, tiny_trajectories
from thundersyncrl.certify.sampled import sample_groups
from thundersyncrl.config import Config, LoraConfig
from thundersyncrl.learner.objective import Objective
from thundersyncrl.learner.policy import DTYPES, Policy, load_policy, make_policy
from thundersyncrl.records import Trajectory

STREAMS = ("batch", "group", "trajectory", "turn")
FAMILIES = {"llama": 1.0, "qwen2": 0.7, "qwen3": 1.4}
"""Supported families, and the temperature at which each is certified."""
BASELINE = 0.3
"""Running mean of past rewards during a certificate."""
_ADAPTED: dict[str, str | tuple[str, ...]] = {
    "llama": "all-linear",
    "qwen2": ("q_proj", "v_proj"),
    # the first layer's keys and values then carry no gradient at all
    "qwen3": ("q_proj", "down_proj"),
}
_VOCABULARY = 48
_TINY_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Arrival orders to run in one dtype."""

    dtype: str
    orders: tuple[int, ...]
    streams: tuple[str, ...] = STREAMS
    offset: bool = False
    """Rewards near 10,000 instead of graded and binary ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One model in one kind of training."""

    name: str
    train: str
    load: Callable[[str], Policy]
    """dtype -> policy, always with the same weights."""
    objectives: Mapping[str, Objective]
    batches: Mapping[RewardKind, Batch]
    rounds: tuple[Round, ...]

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The same under all rewards."""
        return next(iter(self.batches.values())).trajectories

    @property
    def temperature(self) -> float:
        """The same in all objectives: it belongs to the samples."""
        return next(iter(self.objectives.values())).temperature


def tiny_subjects(config: Config | None, *, families: Sequence[str], num_orders: int) -> list[Subject]:
    """Return every family in both kinds of training; the arrival orders are dealt out to the families.

    Args:
        config: certifies only its estimator; None all registered ones.
        families: names of `FAMILIES`.
        num_orders: arrival orders in all.
    """
    subjects: list[Subject] = []
    for index, family in enumerate(families):
        temperature = FAMILIES[family] if config is None else config.rollout.temperature
        objectives = _every_objective() if config is None else {config.algorithm.estimator: objective_of(config)}
        trajectories = tiny_trajectories(vocab_size=_VOCABULARY, seed=index)
        orders = tuple(range(num_orders))[index :: len(families)]
        for train in ("full", "lora"):
            subjects.append(
                Subject(
                    name=family,
                    train=train,
                    load=partial(_tiny_policy, family, train),
                    objectives={n: replace(o, temperature=temperature) for n, o in objectives.items()},
                    batches={kind: tiny_batch(trajectories, kind, seed=index) for kind in RewardKind},
                    rounds=_tiny_rounds(orders, train),
                )
            )
    return subjects


def _tiny_rounds(orders: tuple[int, ...], train: str) -> tuple[Round, ...]:
    """Return all orders in float64; in float32 half of them for each kind of training, runs of four in turn."""
    mine = tuple(o for o in orders if (o // 4 % 2 == 0) == (train == "full")) or orders[:1]
    return (
        Round(dtype="float64", orders=orders),
        Round(dtype="float32", orders=mine),
        # only what is folded before its coefficient is known can suffer from an offset
        Round(dtype="float32", orders=orders[:3], streams=("trajectory",), offset=True),
        Round(dtype="bfloat16", orders=orders[:1], streams=("trajectory",)),
    )


def _every_objective() -> dict[str, Objective]:
    objectives = {name: _objective(get_estimator(name)) for name in estimator_names()}
    # sampled with other arithmetic than the learner's
    objectives["cispo, weights <= 1.2"] = replace(objectives["cispo"], importance_cap=1.2)
    return objectives


def _objective(estimator: Estimator) -> Objective:
    normalizer = choose_normalizer(estimator.normalizer, name=None, constant_length=None, longest=_TINY_LENGTH)
    return Objective(estimator=estimator, normalizer=normalizer)


def objective_of(config: Config) -> Objective:
    """Return the config's objective on rewards as they are compared.

    Detached reward terms (KL, overlong) change rewards before they reach the estimator, so they play no part in
    whether streaming is exact; the certificate's drawn rewards stand for the sums.
    """
    settings = config.algorithm
    estimator = get_estimator(settings.estimator)
    normalizer = choose_normalizer(
        estimator.normalizer,
        name=settings.normalizer,
        constant_length=settings.constant_length,
        longest=config.rollout.max_action_tokens,
    )
    return Objective(
        estimator=estimator,
        normalizer=normalizer,
        temperature=config.rollout.temperature,
        importance_cap=settings.importance_cap,
    )


def rewards_of(objective: Objective, order: int) -> RewardKind:
    """Return the rewards of an order: graded and binary in turn where the estimator takes both."""
    is_binary = objective.estimator.reward_domain is RewardDomain.BINARY or order % 2
    return RewardKind.BINARY if is_binary else RewardKind.GRADED


def _tiny_policy(family: str, train: str, dtype: str) -> Policy:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config
    from transformers.models.llama import LlamaForCausalLM
    from transformers.models.qwen2 import Qwen2ForCausalLM
    from transformers.models.qwen3 import Qwen3ForCausalLM

    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = kinds[family]
    settings: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,  # large enough that attention is far from uniform
        "tie_word_embeddings": family != "llama",
    }
    if family == "qwen3":
        settings["head_dim"] = 8
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**settings))
        # norms and biases start at one and zero, where a lost one can't be told from a kept one
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    lora = LoraConfig(rank=2, alpha=4.0, targets=_ADAPTED[family]) if train == "lora" else None
    return with_live_adapters(make_policy(model, dtype=DTYPES[dtype], lora=lora))


def with_live_adapters(policy: Policy) -> Policy:
    """Return the policy with random adapters: new ones are half zero, and so would be half of the gradient."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.trained.items():
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.copy_(values * parameter.shape[-1] ** -0.5 * 0.5)
    return policy


def config_subjects(config: Config, progress: Callable[[str], None]) -> list[Subject]:
    """Return the config's model with two groups of trajectories that it sampled on the config's tasks."""
    objective = objective_of(config)
    group_size = max(4, objective.estimator.min_group_size + 1)
    with TemporaryDirectory(prefix="thundersyncrl-certify-") as folder:
        trajectories = sample_groups(config, Path(folder), num_groups=2, group_size=group_size, progress=progress)
    kinds = [RewardKind.BINARY]
    if objective.estimator.reward_domain is not RewardDomain.BINARY:
        kinds += [RewardKind.GRADED, RewardKind.OFFSET]
    dtypes = dict.fromkeys(("float64", config.model.dtype))
    rounds = [Round(dtype=dtype, orders=(0,)) for dtype in dtypes]
    # the batch comes whole and the group closes once: only at trajectory level does the order change much
    rounds += [Round(dtype=dtype, orders=(2, 5), streams=("trajectory",)) for dtype in dtypes]
    if config.model.dtype == "float32" and RewardKind.OFFSET in kinds:
        rounds.append(Round(dtype="float32", orders=(0,), streams=("trajectory",), offset=True))
    return [
        Subject(
            name=config.model.path,
            train=config.model.train,
            load=partial(_configured_policy, config),
            objectives={config.algorithm.estimator: objective},
            batches={kind: drawn_batch(trajectories, kind, seed=config.seed) for kind in kinds},
            rounds=tuple(rounds),
        )
    ]


def _configured_policy(config: Config, dtype: str) -> Policy:
    settings = config.model.model_copy(update={"dtype": cast(Any, dtype)})
    return with_live_adapters(load_policy(settings, seed=config.seed)[0])
