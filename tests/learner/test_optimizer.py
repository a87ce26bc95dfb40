from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from thundersyncrl.config import LearnerConfig
from thundersyncrl.errors import NumericsError
from thundersyncrl.learner.optimizer import PolicyOptimizer, schedule_factor


def parameters() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.tensor([1.0, -2.0])), "b": nn.Parameter(torch.tensor([[0.5]]))}


def optimizer_of(named: dict[str, nn.Parameter], total_steps: int = 10, **settings: object) -> PolicyOptimizer:
    return PolicyOptimizer(named, LearnerConfig.model_validate(settings), total_steps=total_steps)


def ascent(step: int) -> list[Tensor]:
    return [torch.tensor([3.0, -1.0 + step]), torch.tensor([[0.25]])]


def test_steps_are_those_of_adamw_on_the_negative_clipped_gradient() -> None:
    named, other = parameters(), parameters()
    mine = optimizer_of(named, learning_rate=0.1, weight_decay=0.01, betas=(0.8, 0.9), max_grad_norm=2.0)
    plain = torch.optim.AdamW(other.values(), lr=0.1, weight_decay=0.01, betas=(0.8, 0.9))
    for step in range(4):
        norm = mine.ascend(ascent(step))
        size = math.sqrt(sum(float((g**2).sum()) for g in ascent(step)))
        assert norm == pytest.approx(size, rel=1e-6)
        for parameter, g in zip(other.values(), ascent(step), strict=True):
            parameter.grad = -g * min(1.0, 2.0 / size)
        plain.step()
        for left, right in zip(named.values(), other.values(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


def test_the_first_step_goes_up_the_gradient() -> None:
    named = parameters()
    before = named["a"].detach().clone()
    optimizer_of(named, learning_rate=0.1).ascend(ascent(0))
    assert bool((torch.sign(named["a"].detach() - before) == torch.sign(ascent(0)[0])).all())


def test_a_gradient_below_the_bound_is_not_scaled() -> None:
    named, other = parameters(), parameters()
    optimizer_of(named, max_grad_norm=1e6, learning_rate=0.1).ascend(ascent(0))
    optimizer_of(other, max_grad_norm=10.0, learning_rate=0.1).ascend(ascent(0))
    assert all(torch.equal(a, b) for a, b in zip(named.values(), other.values(), strict=True))


def test_a_step_without_signal_leaves_every_bit_but_moves_the_schedule() -> None:
    """Case H-08: neither decay nor old moments move a weight when nothing was learned."""
    named = parameters()
    mine = optimizer_of(named, learning_rate=0.1, weight_decay=0.5, warmup_steps=4)
    mine.ascend(ascent(0))
    before = {name: p.detach().clone() for name, p in named.items()}
    rate = mine.learning_rate
    assert mine.ascend([]) == 0.0
    assert all(torch.equal(before[name], p) for name, p in named.items())
    assert mine.learning_rate > rate


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_names_a_parameter(bad: float) -> None:
    named = parameters()
    mine = optimizer_of(named, learning_rate=0.1)
    before = {name: p.detach().clone() for name, p in named.items()}
    with pytest.raises(NumericsError, match="b"):
        mine.ascend([torch.zeros(2), torch.tensor([[bad]])])
    assert all(torch.equal(before[name], p) for name, p in named.items())
    assert not mine.state_dict()["adamw"]["state"]


def test_a_restored_optimizer_goes_on_bit_for_bit() -> None:
    named, other = parameters(), parameters()
    mine = optimizer_of(named, learning_rate=0.1, schedule="cosine", warmup_steps=2)
    for step in range(3):
        mine.ascend(ascent(step))
    again = optimizer_of(other, learning_rate=0.1, schedule="cosine", warmup_steps=2)
    with torch.no_grad():
        for left, right in zip(other.values(), named.values(), strict=True):
            left.copy_(right)
    again.load_state_dict(copy.deepcopy(mine.state_dict()))  # as a checkpoint does
    assert again.learning_rate == mine.learning_rate
    for step in range(3, 6):
        mine.ascend(ascent(step))
        again.ascend(ascent(step))
    assert all(torch.equal(a, b) for a, b in zip(named.values(), other.values(), strict=True))


def test_schedules() -> None:
    def factors(schedule: str) -> list[float]:
        return [schedule_factor(s, schedule=schedule, warmup_steps=2, total_steps=6) for s in range(8)]

    assert factors("constant") == [0.5] + [1.0] * 7
    assert factors("linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    half = math.sqrt(0.5)
    cosine = [0.5, 1.0, 1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0, 0.0]
    assert factors("cosine") == pytest.approx(cosine)


def test_the_learning_rate_follows_the_schedule() -> None:
    mine = optimizer_of(parameters(), learning_rate=0.2, schedule="linear", warmup_steps=2, total_steps=6)
    rates = []
    for step in range(6):
        rates.append(mine.learning_rate)
        mine.ascend(ascent(step))
    assert rates == pytest.approx([0.1, 0.2, 0.2, 0.15, 0.1, 0.05])
