from __future__ import annotations

import random

import pytest
import torch

from tests.learner.builders import plain_logprobs, plain_model, policy_of, random_group, trajectory
from thundersyncrl.config import LoraConfig
from thundersyncrl.learner.branch import branch_tokens
from thundersyncrl.learner.reference import ReferencePolicy


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_the_reference_stays_the_model_as_it_was(lora: LoraConfig | None) -> None:
    """Under adapters it is the base; with full fine-tuning it is a copy that training doesn't reach."""
    base = plain_model(policy_of())
    policy = policy_of(lora=lora)
    reference = ReferencePolicy(policy)
    with torch.no_grad():
        for parameter in policy.trained.values():
            parameter.add_(0.05)
    moved = plain_model(policy)
    for t in random_group(random.Random(0)):
        got = torch.tensor(reference.logprobs(branch_tokens(t), temperature=0.8), dtype=torch.float64)
        torch.testing.assert_close(got, plain_logprobs(base, t, temperature=0.8), rtol=1e-12, atol=1e-12)
        assert not torch.allclose(got, plain_logprobs(moved, t, temperature=0.8), atol=1e-3)


def test_scoring_the_reference_leaves_the_adapters_on() -> None:
    policy = policy_of(lora=LoraConfig(rank=2))
    before = plain_model(policy)
    t = random_group(random.Random(0))[0]
    ReferencePolicy(policy).logprobs(branch_tokens(t), temperature=1.0)
    after = plain_model(policy)
    assert torch.equal(plain_logprobs(before, t), plain_logprobs(after, t))
    assert all(p.requires_grad for p in policy.trained.values())
    assert policy.trained


def test_an_empty_trajectory_has_no_log_probs() -> None:
    assert ReferencePolicy(policy_of()).logprobs(branch_tokens(trajectory([([1, 2], [])])), temperature=1.0) == []
