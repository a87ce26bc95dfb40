"""Detached reward terms and the metrics of a step's signal."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.algorithms.group_relative import normalized
from thundersyncrl.algorithms.shaping import (
    KlEstimator,
    kl_to_reference,
    overlong_penalty,
    reward_spread,
    shaped_reward,
)
from thundersyncrl.errors import ConfigError, ContractError, NumericsError


@given(length=st.integers(0, 400), buffer=st.integers(1, 200))
def test_overlong_penalty_is_piecewise_linear(length: int, buffer: int) -> None:
    expected = np.interp(length, [200 - buffer, 200], [0.0, -1.0])
    assert overlong_penalty(length, max_length=200, buffer=buffer) == pytest.approx(float(expected), abs=1e-12)


def test_overlong_penalty_begins_with_the_first_token_of_its_buffer() -> None:
    lengths = (79, 80, 81, 99, 100, 101)
    penalties = [overlong_penalty(n, max_length=100, buffer=20) for n in lengths]
    assert penalties == [0.0, 0.0, -0.05, -0.95, -1.0, -1.0]


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_overlong_buffer_lies_within_the_budget(buffer: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and 100 tokens"):
        overlong_penalty(5, max_length=100, buffer=buffer)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_kl_estimate_is_the_exact_kl(estimator: KlEstimator) -> None:
    rng = np.random.default_rng(0)
    policy, reference = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    estimates = [
        kl_to_reference([math.log(p)], [math.log(q)], estimator=estimator)
        for p, q in zip(policy, reference, strict=True)
    ]
    exact = float(np.sum(policy * np.log(policy / reference)))
    assert float(policy @ estimates) == pytest.approx(exact, rel=1e-12)


@given(pairs=st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), max_size=10))
def test_kl_sums_over_tokens(pairs: list[tuple[float, float]]) -> None:
    policy, reference = [p for p, _ in pairs], [q for _, q in pairs]
    difference = np.asarray(reference) - np.asarray(policy)
    assert kl_to_reference(policy, reference) == pytest.approx(float(np.sum(-difference)), abs=1e-10)
    k3 = kl_to_reference(policy, reference, estimator="k3")
    assert k3 == pytest.approx(float(np.sum(np.expm1(difference) - difference)), rel=1e-10, abs=1e-12)
    assert k3 >= 0.0


def test_k3_keeps_its_digits_for_small_differences() -> None:
    assert kl_to_reference([-1.0 - 1e-7], [-1.0], estimator="k3") == pytest.approx(5e-15, rel=1e-1)


def test_kl_refuses_missing_tokens_and_infinite_values() -> None:
    with pytest.raises(ContractError, match="got 1 for 2 tokens"):
        kl_to_reference([-1.0, -1.0], [-1.0])
    with pytest.raises(NumericsError, match="finite KL"):
        kl_to_reference([-1.0], [-math.inf])
    with pytest.raises(NumericsError, match="finite KL"):
        kl_to_reference([-2000.0], [-1.0], estimator="k3")
    with pytest.raises(NumericsError, match="finite KL"):
        kl_to_reference([-1.0, -math.inf], [-math.inf, -1.0])


def test_shaped_reward_takes_both_terms() -> None:
    assert shaped_reward(1.0, kl=2.0, kl_coefficient=0.25, overlong=-0.125) == 0.375


def test_the_two_reward_spreads_have_different_names_and_values() -> None:
    """Case H-27."""
    rewards = [[-3.0, -3.0], [5.0, 5.0]]
    metrics = reward_spread(rewards, [normalized(g) for g in rewards]).metrics()
    assert metrics == {
        "reward_std_within_groups": 0.0,
        "reward_std_over_batch": pytest.approx(4.619, abs=5e-4),
        "zero_signal_group_fraction": 1.0,
    }


def test_reward_spread_of_mixed_groups() -> None:
    rewards = [[0.0, 1.0], [1.0, 1.0]]
    spread = reward_spread(rewards, [normalized(g) for g in rewards])
    assert spread.zero_signal_fraction == 0.5
    assert spread.within_group_std == pytest.approx(math.sqrt(0.5) / 2)
    assert spread.batch_std == pytest.approx(float(np.std([0, 1, 1, 1], ddof=1)))


def test_a_step_without_groups_has_no_spread() -> None:
    assert set(reward_spread([], []).metrics().values()) == {0.0}
