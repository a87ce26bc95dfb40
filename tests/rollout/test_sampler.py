"""Laws of drawing: the right distribution, the right log-prob, and noise that belongs to the request alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thundersyncrl.rollout.sampler import BLOCK, draw, noise


def random_logits(rows: int, vocab: int, *, scale: float = 2.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    return (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * scale).to(dtype)


def draw_one(logits: Tensor, temperature: float, seed: int = 0, position: int = 0) -> tuple[int, float]:
    token, logprob = draw(logits[None].clone(), temperatures=[temperature], seeds=[seed], positions=[position])
    return int(token), float(logprob)


def test_the_logprob_is_that_of_the_divided_logits() -> None:
    """Case H-10: log softmax([2, 1, 0] / 0.6) is -0.2026 for token 0; -0.4076 or -0.6793 would be wrong."""
    found: dict[int, float] = {}
    for seed in range(200):
        token, logprob = draw_one(torch.tensor([2.0, 1.0, 0.0]), 0.6, seed)
        found[token] = logprob
    assert found == pytest.approx({0: -0.2026, 1: -1.8693, 2: -3.5360}, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.4])
@pytest.mark.parametrize("vocab", [3, BLOCK, BLOCK + 1, 1000])
def test_logprobs_equal_a_float64_log_softmax(temperature: float, vocab: int) -> None:
    logits = random_logits(40, vocab)
    tokens, logprobs = draw(
        logits.clone(), temperatures=[temperature] * 40, seeds=list(range(40)), positions=list(range(40))
    )
    expected = torch.log_softmax(logits / temperature, dim=-1).gather(1, tokens[:, None])[:, 0]
    assert float((logprobs - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("vocab", [7, BLOCK * 2, BLOCK * 2 + 44])
def test_frequencies_are_the_probabilities(vocab: int) -> None:
    num = 20_000
    logits = random_logits(1, vocab, scale=1.5)
    probabilities = torch.softmax(logits / 0.8, dim=-1)[0]
    tokens, _ = draw(
        logits.expand(num, vocab).clone(), temperatures=[0.8] * num, seeds=list(range(num)), positions=[3] * num
    )
    counts = torch.bincount(tokens, minlength=vocab)
    # Pearson's statistic over cells of at least 10 expected counts; 5 standard deviations
    rare = probabilities * num < 10
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([probabilities[~rare], probabilities[rare].sum()[None]]) * num
    kept = expected > 0
    statistic = float(((observed - expected)[kept] ** 2 / expected[kept]).sum())
    degrees = int(kept.sum()) - 1
    assert abs(statistic - degrees) < 5 * math.sqrt(2 * degrees)


def test_float32_logits_give_float32_exact_logprobs() -> None:
    """Case H-33: rounded to bfloat16 first, the same log-probs would be off by 1e-2."""
    logits = random_logits(64, 300, scale=20.0).bfloat16().float()
    tokens, logprobs = draw(logits.clone(), temperatures=[1.0] * 64, seeds=list(range(64)), positions=[0] * 64)
    expected = torch.log_softmax(logits.double(), dim=-1).gather(1, tokens[:, None])[:, 0]
    assert float((logprobs - expected).abs().max()) < 1e-6
    assert float(logprobs.max()) <= 0


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 80), st.integers(0, 2**70), st.integers(0, 5000), st.data())
def test_a_draw_does_not_depend_on_its_neighbours(rows: int, seed: int, position: int, data: st.DataObject) -> None:
    logits = random_logits(rows, 700)
    row = data.draw(st.integers(0, rows - 1))
    seeds, positions = [seed + i for i in range(rows)], [position + 2 * i for i in range(rows)]
    tokens, logprobs = draw(logits.clone(), temperatures=[1.3] * rows, seeds=seeds, positions=positions)
    alone = draw_one(logits[row], 1.3, seeds[row], positions[row])
    assert (int(tokens[row]), float(logprobs[row])) == alone


def test_temperature_zero_takes_the_largest_logit_with_its_logprob_at_one() -> None:
    logits = random_logits(5, 300)
    temperatures = [0.0, 1.0, 0.0, 0.7, 0.0]
    tokens, logprobs = draw(logits.clone(), temperatures=temperatures, seeds=[1] * 5, positions=[0] * 5)
    for row in (0, 2, 4):
        assert int(tokens[row]) == int(logits[row].argmax())
        assert float(logprobs[row]) == pytest.approx(float(torch.log_softmax(logits[row], -1).max()), abs=1e-12)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [3, 299, 599]] = torch.tensor([0.0, 1.0, 2.0])
    drawn = {draw_one(logits[0], 1.0, seed)[0] for seed in range(300)}
    assert drawn == {3, 299, 599}


def test_one_certain_token_has_logprob_zero() -> None:
    logits = torch.zeros(300)
    logits[77] = 1e6
    assert draw_one(logits, 1.0) == (77, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_show_in_the_logprob_of_their_row_only(bad: float) -> None:
    logits = random_logits(3, 300)
    logits[1, 5] = bad
    _, logprobs = draw(logits, temperatures=[1.0] * 3, seeds=[0] * 3, positions=[0] * 3)
    assert torch.isnan(logprobs).tolist() == [False, True, False]


def test_noise_is_uniform_and_differs_in_seed_position_and_lane() -> None:
    numbers = noise([-1, 0, 1, 2**64 + 2], [0, 1, 2, 3], 25_000)
    assert 0 < numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 5 / math.sqrt(12 * numbers.size)
    assert len(set(numbers.ravel().tolist())) == numbers.size
    by_position = noise([9] * 3, [0, 1, 2], 4)
    assert len(set(by_position.ravel().tolist())) == 12


def test_noise_is_splitmix64_in_whole_numbers() -> None:
    """The same on every machine, so a resumed run samples the same tokens."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    key = mix((mix((7 + golden) & mask) + 4 * golden) & mask)
    expected = [((mix((key + lane * golden) & mask) >> 12) + 0.5) / 2**52 for lane in (1, 2, 3)]
    assert noise([7], [3], 3).tolist() == [expected]
    assert expected[:2] == [0.3727004975297107, 0.4495074553391728]
