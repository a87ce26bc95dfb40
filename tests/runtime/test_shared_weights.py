"""Two policies over one memory read the same numbers, and compute what they computed before."""

from __future__ import annotations

import os

import pytest
import torch

from tests.toys import tiny_model
from thundersyncrl.config import LoraConfig
from thundersyncrl.errors import WorkerError
from thundersyncrl.learner.attention import PrefixPlan
from thundersyncrl.learner.policy import Policy, make_policy
from thundersyncrl.runtime.shared_weights import attach, make_memory, share


def policy_of(*, lora: bool, seed: int = 7, layers: int = 2) -> Policy:
    return make_policy(
        tiny_model("llama", seed=seed, layers=layers), lora=LoraConfig(rank=2) if lora else None, seed=seed
    )


def hidden(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.hidden(torch.tensor([[5, 6, 7]]), torch.arange(3)[None], PrefixPlan()).clone()


@pytest.mark.parametrize("lora", [False, True])
def test_a_write_of_one_is_read_by_the_other(lora: bool) -> None:
    first, second = policy_of(lora=lora), policy_of(lora=lora, seed=8)
    before, memory = hidden(first), make_memory()
    layout = share(first, memory)
    attach(second, memory, layout)
    os.close(memory)  # the mappings live on
    assert torch.equal(hidden(first), before)
    assert torch.equal(hidden(second), before)
    with torch.no_grad():
        for parameter in first.trained.values():
            parameter.add_(0.5)
    assert not torch.equal(hidden(first), before)
    assert torch.equal(hidden(second), hidden(first))
    assert second.digest() == first.digest()


def test_the_optimizer_still_holds_the_parameters() -> None:
    policy = policy_of(lora=False)
    names = {id(p): n for n, p in policy.trained.items()}
    share(policy, make_memory())
    assert {id(p): n for n, p in policy.trained.items()} == names


def test_another_model_is_refused() -> None:
    memory = make_memory()
    layout = share(policy_of(lora=False), memory)
    with pytest.raises(WorkerError, match="same model"):
        attach(policy_of(lora=False, layers=1), memory, layout)
