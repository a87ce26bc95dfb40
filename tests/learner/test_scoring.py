from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.learner.builders import VOCABULARY, plain_logprobs, plain_model, policy_of, random_group, trajectory
from tests.toys import tiny_model
from thundersyncrl.learner import scoring
from thundersyncrl.learner.attention import Prefix
from thundersyncrl.learner.branch import BranchTokens, branch_tokens
from thundersyncrl.learner.policy import Policy, make_policy
from thundersyncrl.learner.scoring import run_prefix, score_pack, token_logprobs
from thundersyncrl.records import GroupId, Trajectory


def head_of_logits(dtype: torch.dtype = torch.float64, *, vocab_size: int = 3) -> Policy:
    """Return a policy whose logits are its hidden states."""
    head = nn.Linear(vocab_size, vocab_size, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(vocab_size))
    stored = torch.float64 if dtype is torch.float64 else torch.float32
    head.to(stored)
    return Policy(model=head, decoder=nn.Identity(), head=head, compute_dtype=dtype)


def scores_of(policy: Policy, trajectories: Sequence[Trajectory], *, temperature: float = 1.0) -> list[Tensor]:
    branches = [branch_tokens(t) for t in trajectories]
    prefixes: dict[GroupId, Prefix | None] = {}
    for branch in branches:
        prefixes[branch.id.group_id] = run_prefix(policy, branch.prefix_ids)[0] if branch.prefix_ids else None
    return [s.logprobs for s in score_pack(policy, branches, prefixes, temperature=temperature)]


def alone(branch: BranchTokens) -> tuple[BranchTokens, ...]:
    return (branch,)


def test_temperature_divides_logits() -> None:
    """Case H-10: -0.2026, not -0.4076 (no temperature) and not -0.6793 (log-prob over T)."""
    hidden, target = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64), torch.tensor([0])
    got = token_logprobs(head_of_logits(), hidden, target, 0.6)
    assert float(got) == pytest.approx(-0.2026, abs=5e-5)
    assert float(token_logprobs(head_of_logits(), hidden, target, 1.0)) == pytest.approx(-0.4076, abs=5e-5)


@pytest.mark.parametrize("chunked", [False, True])
def test_bfloat16_logits_are_normalised_in_float32(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case H-33: logits within +-20 over 300 tokens."""
    if chunked:
        monkeypatch.setattr(scoring, "LOGIT_BYTES", 300 * 4 * 2)
    draw = torch.Generator().manual_seed(0)
    policy = head_of_logits(torch.bfloat16, vocab_size=300)
    logits = (torch.rand(9, 300, generator=draw) * 40 - 20).bfloat16().float()
    targets = torch.randint(300, (9,), generator=draw)
    got = token_logprobs(policy, logits, targets, 1.0)
    exact = logits.double().log_softmax(-1)[torch.arange(9), targets]
    assert got.dtype is torch.float32
    assert float((got - exact).abs().max()) <= 1e-5 * 40  # float32 has 7 digits of numbers up to 40
    torch.testing.assert_close(got, logits.log_softmax(-1)[torch.arange(9), targets], rtol=1e-6, atol=1e-6)
    assert bool((got <= 0).all())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_neither_log_probs_nor_gradients(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of()
    parameters = list(policy.trained.values())
    t = trajectory([([1, 2, 3], list(range(20))), ([4, 5], list(range(20)))])

    def both() -> tuple[Tensor, tuple[Tensor, ...]]:
        logprobs = scores_of(policy, [t], temperature=temperature)[0]
        weights = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)
        return logprobs, torch.autograd.grad((weights * logprobs).sum(), parameters)

    whole, whole_gradient = both()
    monkeypatch.setattr(scoring, "LOGIT_BYTES", VOCABULARY * 8 * 3)
    parts, parts_gradient = both()
    torch.testing.assert_close(parts, whole, rtol=1e-13, atol=1e-13)
    for left, right in zip(parts_gradient, whole_gradient, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-13)


def test_no_rectangle_of_logits_is_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forward nor backward, and only positions that chose an action token get logits at all."""
    policy = policy_of(dtype=torch.float32)
    rows: list[int] = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        rows.append(output.numel() // VOCABULARY)

    policy.head.register_forward_hook(count)
    t = trajectory([([1, 2, 3], [5] * 10), ([4] * 30, [6] * 7)])
    logprobs = scores_of(policy, [t])[0]
    assert rows == [17]
    rows.clear()
    monkeypatch.setattr(scoring, "LOGIT_BYTES", VOCABULARY * 4 * 5)
    logprobs = scores_of(policy, [t])[0]
    torch.autograd.grad(logprobs.sum(), list(policy.trained.values()))
    assert max(rows) == 5
    assert sum(rows) == 2 * 17  # once forward, once again backward


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_plain_transformers(family: Any, temperature: float) -> None:
    """Packed against shared prompts, without padding, several turns, two groups."""
    policy = policy_of(family)
    model = plain_model(policy)
    draw = random.Random(3)
    members = [*random_group(draw, group=0, prompt=6), *random_group(draw, group=1, prompt=1)]
    for t, got in zip(members, scores_of(policy, members, temperature=temperature), strict=True):
        torch.testing.assert_close(got, plain_logprobs(model, t, temperature=temperature), rtol=1e-12, atol=1e-12)


def test_packed_neighbours_do_not_see_each_other() -> None:
    """Case H-11: alone or packed the same within 1e-5, and bit-equal whatever the neighbour's tokens are."""
    policy = make_policy(tiny_model(vocab_size=VOCABULARY), dtype=torch.float32)
    first = trajectory([([1], [4, 5, 6, 7, 8])], group=0)
    second = trajectory([([2], [9, 10, 11, 12])], group=1)
    packed = scores_of(policy, [first, second])
    for t, got in zip((first, second), packed, strict=True):
        assert float((got - scores_of(policy, [t])[0]).abs().max()) < 1e-5
    for position in range(4):
        tokens = [4, 5, 6, 7, 8]
        tokens[position] = 30
        changed = scores_of(policy, [trajectory([([1], tokens)], group=0), second])
        assert torch.equal(changed[1], packed[1])
        assert not torch.equal(changed[0], packed[0])


def test_gradients_do_not_cross_between_packed_neighbours() -> None:
    """The sum of two packed branches has the gradient of each alone, added."""
    policy = policy_of()
    parameters = list(policy.trained.values())
    first = trajectory([([1, 2], [4, 5, 6])], group=0)
    second = trajectory([([2, 3, 4], [9, 10])], group=1)
    together = torch.autograd.grad(sum(s.sum() for s in scores_of(policy, [first, second])), parameters)
    apart = [torch.autograd.grad(scores_of(policy, [t])[0].sum(), parameters) for t in (first, second)]
    for both, a, b in zip(together, *apart, strict=True):
        torch.testing.assert_close(both, a + b, rtol=1e-12, atol=1e-13)


def test_an_end_token_equal_to_the_pad_token_is_scored_and_read() -> None:
    """Case H-12: id 2 ends actions and pads elsewhere; it has a gradient, and a prompt that holds it is read."""
    policy = policy_of()
    with_two, without = trajectory([([9, 2, 7], [5, 6, 2])]), trajectory([([9, 3, 7], [5, 6, 2])])
    logprobs = scores_of(policy, [with_two])[0]
    assert len(logprobs) == 3
    (gradient,) = torch.autograd.grad(logprobs[2], [policy.trained["model.norm.weight"]])
    assert float(gradient.norm()) > 1e-3
    assert not torch.allclose(logprobs, scores_of(policy, [without])[0], atol=1e-4)
