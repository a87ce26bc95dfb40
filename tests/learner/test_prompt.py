from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.learner.builders import policy_of
from thundersyncrl.config import LoraConfig
from thundersyncrl.learner.attention import PrefixPlan
from thundersyncrl.learner.policy import Policy
from thundersyncrl.learner.prompt import Prompt

IDS = (3, 1, 4, 1, 5)


def adjoints_of(prompt: Prompt) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t.dtype) for t in prompt.prefix.leaves]


def expected(policy: Policy, adjoints: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradient of sum <adjoint, key or value> by one plain backward."""
    plan = PrefixPlan()
    policy.hidden(torch.tensor([IDS]), torch.arange(len(IDS))[None], plan)
    total = sum((t * a).sum() for t, a in zip((*plan.keys_L, *plan.values_L), adjoints, strict=True))
    return torch.autograd.grad(total, list(policy.trained.values()), allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep_graph", [True, False])
@pytest.mark.parametrize("targets", [None, "all-linear", ("down_proj",)])
def test_walk_is_the_backward_through_keys_and_values(keep_graph: bool, targets: Any) -> None:
    """With adapters on the last matrix of a layer only, the first layer's keys carry no gradient at all."""
    policy = policy_of(lora=None if targets is None else LoraConfig(rank=2, targets=targets))
    prompt = Prompt(policy, IDS, keep_graph=keep_graph)
    adjoints = adjoints_of(prompt)
    walked = prompt.walk(adjoints, list(policy.trained.values()))
    for got, wanted in zip(walked, expected(policy, adjoints), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
    assert max(float(g.norm()) for g in walked) > 0


@pytest.mark.parametrize(("keep_graph", "forwards"), [(True, 1), (False, 2)])
def test_only_a_prompt_without_a_kept_graph_runs_twice(keep_graph: bool, forwards: int) -> None:
    policy = policy_of()
    prompt = Prompt(policy, IDS, keep_graph=keep_graph)
    assert (prompt.num_forwards, prompt.keeps_graph) == (1, keep_graph)
    prompt.walk(adjoints_of(prompt), list(policy.trained.values()))
    assert (prompt.num_forwards, prompt.keeps_graph) == (forwards, False)


@pytest.mark.parametrize("keep_graph", [True, False])
def test_branches_get_leaves(keep_graph: bool) -> None:
    prompt = Prompt(policy_of(), IDS, keep_graph=keep_graph)
    for leaf in prompt.prefix.leaves:
        assert leaf.is_leaf
        assert leaf.requires_grad
    assert prompt.prefix.num_tokens == len(IDS)
