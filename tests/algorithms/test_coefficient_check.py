"""Advantages that aren't of the declared class raise; honest ones never do, whatever the rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.algorithms.coefficient_check import affine_coefficients, check_class, check_known
from thundersyncrl.algorithms.estimator import CoefficientClass
from thundersyncrl.algorithms.group_relative import (
    clipped,
    leave_one_out_normalized,
    normalized,
)
from thundersyncrl.algorithms.own_reward import above
from thundersyncrl.errors import CoefficientClassError, ContractError, NumericsError

AFFINE = (CoefficientClass.AFFINE_GROUP, CoefficientClass.AFFINE_BATCH)
finite = st.floats(-1e6, 1e6, allow_subnormal=False)


@pytest.mark.parametrize("coefficient", AFFINE)
@given(rewards=st.lists(finite, min_size=1, max_size=12), alpha=st.floats(-100, 100), beta=st.floats(-100, 100))
def test_any_affine_advantages_pass(
    coefficient: CoefficientClass, rewards: list[float], alpha: float, beta: float
) -> None:
    check_class(coefficient, rewards, [alpha * r + beta for r in rewards], where="here")


@pytest.mark.parametrize("coefficient", AFFINE)
@pytest.mark.parametrize("alpha", [5e-324, 1e-320, 3e-310, -1e-315])
def test_advantages_too_small_for_full_precision_pass(coefficient: CoefficientClass, alpha: float) -> None:
    rewards = [1.0, -1.5, 3e5, 0.25]
    check_class(coefficient, rewards, [alpha * r for r in rewards], where="here")


@pytest.mark.parametrize("coefficient", AFFINE)
def test_naive_advantages_at_a_large_offset_pass(coefficient: CoefficientClass) -> None:
    # An estimator that doesn't centre first loses digits here; it is inaccurate, not of another class.
    rng = np.random.default_rng(0)
    for _ in range(200):
        rewards = 10000.0 + rng.random(8)
        naive = (rewards - rewards.mean()) / (np.sqrt(np.mean(rewards**2) - np.mean(rewards) ** 2) + 1e-4)
        check_class(coefficient, rewards.tolist(), naive.tolist(), where="here")


@pytest.mark.parametrize("coefficient", AFFINE)
@pytest.mark.parametrize("offset", [0.0, 10000.0])
@pytest.mark.parametrize("misfit", [1e-6, 1e-3, 1.0])
def test_one_wrong_advantage_is_caught(coefficient: CoefficientClass, offset: float, misfit: float) -> None:
    rewards = [offset + r for r in (0.0, 0.25, 0.5, 1.0)]
    for index in range(4):
        advantages = [2.0 * (r - offset) - 1.0 for r in rewards]
        advantages[index] += misfit
        with pytest.raises(CoefficientClassError, match=r"step=0/group=7"):
            check_class(coefficient, rewards, advantages, where="step=0/group=7")


@pytest.mark.parametrize("coefficient", AFFINE)
def test_unequal_advantages_for_equal_rewards_are_caught(coefficient: CoefficientClass) -> None:
    with pytest.raises(CoefficientClassError):
        check_class(coefficient, [1.0, 1.0, 1.0], [1.0, 1.0, 0.5], where="here")
    with pytest.raises(CoefficientClassError):
        check_class(coefficient, [1.0, 1.0, 0.0], [1.0, 1.5, 0.0], where="here")


def test_the_message_has_the_numbers_and_the_remedy() -> None:
    with pytest.raises(CoefficientClassError) as caught:
        check_class(CoefficientClass.AFFINE_GROUP, [0.0, 0.5, 1.0], [0.0, 1.0, 1.0], where="step=3/group=5")
    message = str(caught.value)
    for part in (
        "affine_group",
        "got 1.0",
        "reward 0.5",
        "gives 0.5",
        "index 1 of 3",
        "step=3/group=5",
        "by_value",
    ):
        assert part in message


@given(rewards=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=10))
def test_functions_of_the_reward_are_by_value(rewards: list[float]) -> None:
    check_class(CoefficientClass.BY_VALUE, rewards, leave_one_out_normalized(rewards), where="here")
    check_class(CoefficientClass.BY_VALUE, rewards, clipped(normalized(rewards), bound=1.0), where="here")


def test_ranks_that_break_ties_are_not_by_value() -> None:
    with pytest.raises(CoefficientClassError, match="arbitrary"):
        check_class(CoefficientClass.BY_VALUE, [1.0, 0.0, 1.0], [2.0, 0.0, 1.0], where="here")
    check_class(CoefficientClass.ARBITRARY, [1.0, 0.0, 1.0], [2.0, 0.0, 1.0], where="here")


@pytest.mark.parametrize("coefficient", CoefficientClass)
def test_every_class_refuses_non_finite_numbers_and_wrong_counts(coefficient: CoefficientClass) -> None:
    for rewards, advantages in (
        ([1.0, 0.0], [math.nan, 0.0]),
        ([1.0, 0.0], [math.inf, 0.0]),
        ([math.nan, 0.0], [1.0, 0.0]),
    ):
        with pytest.raises(NumericsError, match="index 0, here"):
            check_class(coefficient, rewards, advantages, where="here")
    with pytest.raises(ContractError, match="got 1 for 2 rewards"):
        check_class(coefficient, [1.0, 0.0], [1.0], where="here")


@pytest.mark.parametrize("coefficient", CoefficientClass)
def test_nothing_to_check_passes(coefficient: CoefficientClass) -> None:
    check_class(coefficient, [], [], where="here")
    check_class(coefficient, [0.3], [0.0], where="here")


@pytest.mark.parametrize("offset", [0.0, 10000.0])
def test_affine_coefficients_give_the_advantages_back(offset: float) -> None:
    rng = np.random.default_rng(1)
    rewards = (offset + rng.random(32)).tolist()
    advantages = normalized(rewards)
    alpha, anchor = affine_coefficients(rewards, advantages)
    rebuilt = [advantages[anchor] + alpha * (r - rewards[anchor]) for r in rewards]
    assert anchor == 0
    np.testing.assert_allclose(rebuilt, advantages, rtol=0, atol=2e-15 if offset == 0 else 4e-15)


def test_affine_coefficients_of_equal_or_no_rewards_are_flat() -> None:
    assert affine_coefficients([0.7, 0.7], [0.0, 0.0]) == (0.0, 0)
    assert affine_coefficients([], []) == (0.0, 0)


@given(rewards=st.lists(finite, min_size=1, max_size=8))
def test_known_advantages_do_not_change_with_the_group(rewards: list[float]) -> None:
    alone = [above([r], baseline=0.25)[0] for r in rewards]
    check_known(alone, above(rewards, baseline=0.25), where="here")


def test_a_group_relative_estimator_that_calls_itself_known_is_caught() -> None:
    rewards = [1.0, 0.0, 0.0]
    alone = [normalized([r])[0] for r in rewards]
    with pytest.raises(CoefficientClassError, match=r"known.*index 0, here"):
        check_known(alone, normalized(rewards), where="here")


@pytest.mark.parametrize("coefficient", AFFINE)
def test_rounding_of_rewards_that_hardly_differ_is_no_misfit(coefficient: CoefficientClass) -> None:
    # These rewards are known to one part in a thousand of their range, so their advantages are too.
    rewards = [1e6 + n * 1e-7 for n in range(8)]
    check_class(coefficient, rewards, [3.3 * r + 7.0 for r in rewards], where="here")


@pytest.mark.parametrize("coefficient", [*AFFINE, CoefficientClass.BY_VALUE])
def test_one_ulp_between_equal_rewards_is_no_misfit(coefficient: CoefficientClass) -> None:
    check_class(coefficient, [0.5, 0.5], [0.3, math.nextafter(0.3, 1.0)], where="here")
