"""Token weights, divisors and truncated importance weights."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.algorithms.weights import Normalizer, choose_normalizer, truncated_importance
from thundersyncrl.errors import ConfigError, ContractError, NumericsError

NORMALIZERS = [
    Normalizer(name="token"),
    Normalizer(name="trajectory"),
    Normalizer(name="constant", constant_length=7),
]
lengths_lists = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def split_mean(normalizer: Normalizer, values: list[list[float]], cuts: list[int]) -> float:
    """Accumulate weighted token values over the parts of a step, then divide once by all counts."""
    total, lengths = 0.0, list[int]()
    for start, end in pairwise([0, *cuts, len(values)]):
        part = values[start:end]
        total += sum(normalizer.token_weight(len(v)) * x for v in part for x in v)
        lengths += [len(v) for v in part]
    return total / normalizer.divisor(lengths)


@pytest.mark.parametrize("cuts", [[], [1], [0, 1], [1, 1]])
def test_token_mean_is_the_same_for_every_split(cuts: list[int]) -> None:
    """Case H-09: 1 and 9 tokens with gradients 1 and 0 give 0.1; a mean of means would give 0.5."""
    assert split_mean(Normalizer(name="token"), [[1.0], [0.0] * 9], cuts) == pytest.approx(0.1)


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=lambda n: n.name)
@given(lengths=lengths_lists, seed=st.integers(0, 100), cut=st.integers(0, 8))
def test_any_split_gives_the_means_of_the_definition(
    normalizer: Normalizer, lengths: list[int], seed: int, cut: int
) -> None:
    """Case H-09."""
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=n) for n in lengths]
    expected = {
        "token": np.concatenate(values).mean(),
        "trajectory": np.mean([v.mean() for v in values]),
        "constant": np.mean([v.sum() / 7 for v in values]),
    }[normalizer.name]
    got = split_mean(normalizer, [v.tolist() for v in values], [min(cut, len(lengths))])
    assert got == pytest.approx(float(expected), rel=1e-10, abs=1e-12)


def test_an_empty_trajectory_has_no_weight_and_is_still_counted() -> None:
    """Case H-13: lengths 1, 0, 2, 3."""
    lengths = [1, 0, 2, 3]
    assert [n.token_weight(0) for n in NORMALIZERS] == [0.0, 0.0, 0.0]
    assert [n.divisor(lengths) for n in NORMALIZERS] == [6.0, 4.0, 28.0]


def test_a_step_in_which_nothing_counts_is_divided_by_one() -> None:
    assert [n.divisor([]) for n in NORMALIZERS] == [1.0, 1.0, 1.0]
    assert Normalizer(name="token").divisor([0, 0]) == 1.0


def test_impossible_normalizers_are_refused() -> None:
    with pytest.raises(ConfigError, match="'sequence'"):
        Normalizer(name="sequence")
    with pytest.raises(ConfigError, match="at least 1 token"):
        Normalizer(name="constant")
    with pytest.raises(ConfigError, match="no effect"):
        Normalizer(name="token", constant_length=3)


def test_the_config_wins_over_the_estimators_own_normalizer() -> None:
    def chosen(own: str, name: str | None, constant_length: int | None) -> Normalizer:
        return choose_normalizer(own, name=name, constant_length=constant_length, longest=256)

    assert chosen("trajectory", None, None) == Normalizer(name="trajectory")
    assert chosen("trajectory", "token", None) == Normalizer(name="token")
    assert chosen("constant", None, None) == Normalizer(name="constant", constant_length=256)
    assert chosen("token", "constant", 64) == Normalizer(name="constant", constant_length=64)
    with pytest.raises(ConfigError, match="no effect"):
        chosen("token", None, 64)


@given(
    pairs=st.lists(st.tuples(st.floats(-50, 0), st.floats(-50, 0)), max_size=10),
    cap=st.floats(0.1, 10),
)
def test_importance_weights_are_the_truncated_ratios(pairs: list[tuple[float, float]], cap: float) -> None:
    learner, behavior = [p for p, _ in pairs], [q for _, q in pairs]
    expected = np.minimum(np.exp(np.asarray(learner) - np.asarray(behavior)), cap)
    np.testing.assert_allclose(truncated_importance(learner, behavior, cap), expected, rtol=1e-12)


def test_importance_weights_never_overflow() -> None:
    assert truncated_importance([-1.0, -2000.0, -math.inf, -1.0], [-2000.0, -1.0, -1.0, -math.inf], 2.0) == [
        2.0,
        0.0,
        0.0,
        2.0,
    ]


def test_importance_weights_refuse_what_has_no_ratio() -> None:
    with pytest.raises(NumericsError, match="action token 0"):
        truncated_importance([-math.inf], [-math.inf], 2.0)
    with pytest.raises(NumericsError, match="action token 1"):
        truncated_importance([-1.0, math.nan], [-1.0, -1.0], 2.0)
    with pytest.raises(ContractError, match="got 1 for 2 tokens"):
        truncated_importance([-1.0, -1.0], [-1.0], 2.0)


@pytest.mark.parametrize("cap", [0.0, -1.0, math.inf, math.nan])
def test_impossible_caps_are_refused(cap: float) -> None:
    with pytest.raises(ContractError, match="finite cap above 0"):
        truncated_importance([-1.0], [-1.0], cap)
