"""Law: the step's gradient is the gradient of each algorithm's published surrogate, taken on-policy.

That is, (1 / divisor) * sum_i A_i * sum_t w_it * grad log pi_it. A tiny softmax policy over states and
tokens, in float64. The surrogates are written here as in the papers, with their ratios and clips, and
differentiated by central differences at ratio 1, where no clip is active. What papers detach (CISPO's weight,
the advantages) is held fixed. The last tests check that the estimators which claim it are unbiased, by
summing over every possible group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

from thundersyncrl.algorithms import advantages as published_estimators
from thundersyncrl.algorithms.estimator import Estimator, GroupRewards, get_estimator
from thundersyncrl.algorithms.order_statistics import max_at_k
from thundersyncrl.algorithms.weights import Normalizer, truncated_importance

Array = Any
NUM_STATES, NUM_TOKENS = 5, 4
Groups = list[list["Rollout"]]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    states: Array
    tokens: Array
    reward: float


def log_policy(theta: Array) -> Array:
    """Return [S, V] log-probs of the softmax policy."""
    shifted = theta - theta.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def logprobs(theta: Array, rollout: Rollout) -> Array:
    return log_policy(theta)[rollout.states, rollout.tokens]


def score_gradient(theta: Array, rollout: Rollout, weights: Array) -> Array:
    """Return sum_t w_t * grad log pi_t, by the softmax rule one-hot minus probabilities."""
    gradient = np.zeros_like(theta)
    probabilities = np.exp(log_policy(theta))
    for state, token, weight in zip(rollout.states, rollout.tokens, weights, strict=True):
        gradient[state] -= weight * probabilities[state]
        gradient[state, token] += weight
    return gradient


def central_differences(function: Callable[[Array], float], theta: Array) -> Array:
    gradient = np.zeros_like(theta)
    for index in np.ndindex(*theta.shape):
        step = np.zeros_like(theta)
        step[index] = 1e-5
        gradient[index] = (function(theta + step) - function(theta - step)) / 2e-5
    return gradient


def make_step(rng: np.random.Generator, rewards: Sequence[Sequence[float]]) -> tuple[Array, Groups]:
    """Return parameters and rollouts of 1 to 6 tokens with the given rewards."""
    theta = rng.normal(size=(NUM_STATES, NUM_TOKENS))
    groups: Groups = []
    for group in rewards:
        lengths = rng.integers(1, 7, len(group))
        groups.append(
            [
                Rollout(states=rng.integers(0, NUM_STATES, n), tokens=rng.integers(0, NUM_TOKENS, n), reward=r)
                for n, r in zip(lengths, group, strict=True)
            ]
        )
    return theta, groups


def package_gradient(
    name: str,
    theta: Array,
    groups: Groups,
    *,
    normalizer: Normalizer,
    baseline: float = 0.0,
    cap: float | None = None,
    behavior: Array | None = None,
) -> Array:
    """Return the gradient as the package defines it: late coefficients on score gradients, one division."""
    estimator = get_estimator(name)
    rewards = [
        GroupRewards(rewards_G=tuple(r.reward for r in g), lengths_G=tuple(len(r.tokens) for r in g)) for g in groups
    ]
    advantages = estimator.advantages(rewards, baseline)
    total, counted = np.zeros_like(theta), list[int]()
    for group, group_advantages in zip(groups, advantages, strict=True):
        if estimator.drops_uniform_groups and len({r.reward for r in group}) == 1:
            continue
        for rollout, advantage in zip(group, group_advantages, strict=True):
            length = len(rollout.tokens)
            weights = np.full(length, normalizer.token_weight(length))
            if cap is not None and behavior is not None:
                learner, sampled = logprobs(theta, rollout), logprobs(behavior, rollout)
                weights = weights * truncated_importance(learner.tolist(), sampled.tolist(), cap)
            total += advantage * score_gradient(theta, rollout, weights)
            counted.append(length)
    scale = 1.0 if estimator.batch_scale is None else estimator.batch_scale(advantages)
    return total * scale / normalizer.divisor(counted)


def group_rewards(group: list[Rollout]) -> Array:
    return np.array([r.reward for r in group])


def grpo_advantages(group: list[Rollout]) -> Array:
    r = group_rewards(group)
    return (r - r.mean()) / (r.std() + 1e-4)


def others_mean(r: Array) -> Array:
    return np.array([np.delete(r, i).mean() for i in range(len(r))])


def clipped_term(theta: Array, old: Array, rollout: Rollout, advantage: float, low: float, high: float) -> Array:
    """Return [T] min(ratio * A, clip(ratio) * A)."""
    ratio = np.exp(logprobs(theta, rollout) - logprobs(old, rollout))
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


# --- The published surrogates, as functions of theta with everything else fixed at `old`. ---


def grpo_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    """DeepSeekMath, equation 3 without its KL term."""
    return float(
        np.mean(
            [
                np.mean([clipped_term(theta, old, r, a, 0.2, 0.2).mean() for r, a in zip(g, adv, strict=True)])
                for g, adv in ((g, grpo_advantages(g)) for g in groups)
            ]
        )
    )


def grpo_sample_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    values = []
    for g in groups:
        r = group_rewards(g)
        advantages = (r - r.mean()) / (r.std(ddof=1) + 1e-4)
        values.append(
            np.mean([clipped_term(theta, old, x, a, 0.2, 0.2).mean() for x, a in zip(g, advantages, strict=True)])
        )
    return float(np.mean(values))


def grpo_clipped_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    values = []
    for g in groups:
        advantages = np.clip(grpo_advantages(g), -2, 2)
        values.append(
            np.mean([clipped_term(theta, old, x, a, 0.2, 0.2).mean() for x, a in zip(g, advantages, strict=True)])
        )
    return float(np.mean(values))


def gspo_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    """GSPO: one ratio per sequence, the geometric mean of the token ratios."""
    values = []
    for g in groups:
        for x, a in zip(g, grpo_advantages(g), strict=True):
            ratio = np.exp(np.mean(logprobs(theta, x) - logprobs(old, x)))
            values.append(min(ratio * a, np.clip(ratio, 1 - 3e-4, 1 + 4e-4) * a) / len(g))
    return float(np.sum(values) / len(groups))


def dr_grpo_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    """Dr. GRPO: no deviation, and the generation budget instead of the length."""
    values = []
    for g in groups:
        r = group_rewards(g)
        for x, a in zip(g, r - r.mean(), strict=True):
            values.append(clipped_term(theta, old, x, a, 0.2, 0.2).sum() / 6)
    return float(np.mean(values))


def token_mean(theta: Array, old: Array, groups: Groups, advantages: list[Array], low: float, high: float) -> float:
    pairs = [(x, a) for g, adv in zip(groups, advantages, strict=True) for x, a in zip(g, adv, strict=True)]
    terms = [clipped_term(theta, old, x, a, low, high) for x, a in pairs]
    return float(np.concatenate(terms).mean())


def dapo_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    """DAPO, equation 8, over groups that are neither all right nor all wrong; token mean over the step."""
    kept = [g for g in groups if len({x.reward for x in g}) > 1]
    return token_mean(theta, old, kept, [grpo_advantages(g) for g in kept], 0.2, 0.28)


def reinforce_pp_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    everything = np.concatenate([group_rewards(g) for g in groups])
    advantages = [(group_rewards(g) - everything.mean()) / everything.std() for g in groups]
    return token_mean(theta, old, groups, advantages, 0.2, 0.2)


def reinforce_pp_baseline_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    centred = [group_rewards(g) - group_rewards(g).mean() for g in groups]
    scale = np.concatenate(centred).std()
    return token_mean(theta, old, groups, [c / scale for c in centred], 0.2, 0.2)


def leave_one_out_std_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    advantages = []
    for g in groups:
        r = group_rewards(g)
        stds = np.array([np.delete(r, i).std(ddof=1) for i in range(len(r))])
        advantages.append(
            np.where(stds > 0, (r - others_mean(r)) / np.where(stds > 0, stds + 1e-6, 1), r - others_mean(r))
        )
    return token_mean(theta, old, groups, advantages, 0.2, 0.2)


def cispo_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    """MiniMax-M1: the clipped ratio is detached, so it stays at its value at `old`: 1."""
    terms = []
    for g in groups:
        for x, a in zip(g, grpo_advantages(g), strict=True):
            detached = np.minimum(np.exp(logprobs(old, x) - logprobs(old, x)), 1.28)
            terms.append(detached * a * logprobs(theta, x))
    return float(np.concatenate(terms).mean())


def sequence_mean(theta: Array, groups: Groups, advantages: list[Array]) -> float:
    """Mean over trajectories of A * log pi(whole trajectory)."""
    return float(
        np.mean(
            [
                a * logprobs(theta, x).sum()
                for g, adv in zip(groups, advantages, strict=True)
                for x, a in zip(g, adv, strict=True)
            ]
        )
    )


def rloo_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    return sequence_mean(theta, groups, [group_rewards(g) - others_mean(group_rewards(g)) for g in groups])


def opo_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    baselines = [np.average(group_rewards(g), weights=[len(x.tokens) for x in g]) for g in groups]
    return sequence_mean(theta, groups, [group_rewards(g) - b for g, b in zip(groups, baselines, strict=True)])


def maxrl_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    """MaxRL: the mean score of the successes minus the mean score of all; nothing without a success."""
    value = 0.0
    for g in groups:
        sums = np.array([logprobs(theta, x).sum() for x in g])
        successes = group_rewards(g) == 1
        if successes.any():
            value += sums[successes].mean() - sums.mean()
    return value / len(groups)


def raft_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    """RAFT: the likelihood of the successes, per token of each."""
    return float(np.mean([logprobs(theta, x).mean() if x.reward == 1 else 0.0 for g in groups for x in g]))


def reinforce_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    return sequence_mean(theta, groups, [group_rewards(g) - 0.5 for g in groups])


def running_mean_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    return sequence_mean(theta, groups, [group_rewards(g) - 0.3 for g in groups])


def subsets(size: int, k: int) -> list[Array]:
    flags = np.array(list(product([False, True], repeat=size)))
    return list(flags[flags.sum(axis=1) == k])


def pass_at_k_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    """Pass@k training: GRPO on the best rewards of all 4-subsets, shared by their members; token mean."""
    advantages = []
    for g in groups:
        r, parts = group_rewards(g), subsets(len(g), 4)
        best = np.array([r[part].max() for part in parts])
        whitened = (best - best.mean()) / best.std() if best.std() > 0 else np.zeros_like(best)
        advantages.append(
            np.array([np.mean([w for w, part in zip(whitened, parts, strict=True) if part[i]]) for i in range(len(g))])
        )
    return token_mean(theta, old, groups, advantages, 0.2, 0.2)


def pass_at_k_continuous_surrogate(theta: Array, old: Array, groups: Groups) -> float:
    """PKPO: per 4-subset, the score of each member times what it adds to the best reward."""
    value = 0.0
    for g in groups:
        r, parts = group_rewards(g), subsets(len(g), 4)
        for part in parts:
            members = np.flatnonzero(part)
            for i in members:
                gain = r[members].max() - r[members[members != i]].max()
                value += gain * logprobs(theta, g[i]).sum() / len(parts)
    return value / len(groups)


TOKEN, TRAJECTORY = Normalizer(name="token"), Normalizer(name="trajectory")
BUDGET, PER_TRAJECTORY = (
    Normalizer(name="constant", constant_length=6),
    Normalizer(name="constant", constant_length=1),
)
LAWS: dict[str, tuple[Callable[[Array, Array, Groups], float], Normalizer]] = {
    "cispo": (cispo_surrogate, TOKEN),
    "constant_baseline": (reinforce_surrogate, PER_TRAJECTORY),
    "dapo": (dapo_surrogate, TOKEN),
    "dr_grpo": (dr_grpo_surrogate, BUDGET),
    "grpo": (grpo_surrogate, TRAJECTORY),
    "grpo_clipped": (grpo_clipped_surrogate, TRAJECTORY),
    "grpo_sample_std": (grpo_sample_surrogate, TRAJECTORY),
    "gspo": (gspo_surrogate, TRAJECTORY),
    "leave_one_out_std": (leave_one_out_std_surrogate, TOKEN),
    "maxrl": (maxrl_surrogate, PER_TRAJECTORY),
    "opo": (opo_surrogate, PER_TRAJECTORY),
    "pass_at_k": (pass_at_k_surrogate, TOKEN),
    "pass_at_k_continuous": (pass_at_k_continuous_surrogate, PER_TRAJECTORY),
    "raft": (raft_surrogate, TRAJECTORY),
    "reinforce_pp": (reinforce_pp_surrogate, TOKEN),
    "reinforce_pp_baseline": (reinforce_pp_baseline_surrogate, TOKEN),
    "rloo": (rloo_surrogate, PER_TRAJECTORY),
    "running_mean": (running_mean_surrogate, PER_TRAJECTORY),
}
# Papers average over prompts with one group size; ours averages over trajectories, which is the same then.
BINARY = [
    [1.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    [0.0] * 6,
    [1.0, 1.0, 0.0, 1.0, 0.0, 1.0],
    [0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
]
GRADED = [[1.0, 0.5, 0.25, 0.0, 0.0, 0.75], [0.5] * 6, [0.1, 0.9, 0.3, -0.4, 0.0, 0.2]]
REWARDS = {"binary": BINARY, "graded": GRADED}
NEEDS_BINARY = {"maxrl", "raft", "pass_at_k"}
"""Their published surrogates are defined on binary rewards only."""


CASES = [(name, kind) for name in LAWS for kind in REWARDS if not (kind == "graded" and name in NEEDS_BINARY)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_gradient_is_that_of_the_published_surrogate(name: str, kind: str) -> None:
    surrogate, normalizer = LAWS[name]
    assert normalizer.name == get_estimator(name).normalizer
    theta, groups = make_step(np.random.default_rng(7), REWARDS[kind])
    expected = central_differences(lambda t: surrogate(t, theta, groups), theta)
    got = package_gradient(name, theta, groups, normalizer=normalizer, baseline=0.3)
    assert np.linalg.norm(expected) > 1e-2
    assert np.linalg.norm(got - expected) <= 1e-8 * max(np.linalg.norm(expected), 1.0)


def test_every_published_estimator_has_its_law() -> None:
    published = {v.name for v in vars(published_estimators).values() if isinstance(v, Estimator)}
    assert set(LAWS) == published


def test_truncated_importance_weights_give_the_detached_ratio_surrogate() -> None:
    """The weights are fixed at theta, and the loss stays linear in the advantage."""
    rng = np.random.default_rng(8)
    theta, groups = make_step(rng, GRADED)
    sampler = theta + 0.5 * rng.normal(size=theta.shape)

    def surrogate(moved: Array) -> float:
        terms = []
        for g in groups:
            for x, a in zip(g, grpo_advantages(g), strict=True):
                detached = np.minimum(np.exp(logprobs(theta, x) - logprobs(sampler, x)), 1.2)
                terms.append(detached * a * logprobs(moved, x))
        return float(np.concatenate(terms).mean())

    expected = central_differences(surrogate, theta)
    got = package_gradient("cispo", theta, groups, normalizer=TOKEN, cap=1.2, behavior=sampler)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)
    plain = package_gradient("cispo", theta, groups, normalizer=TOKEN)
    assert np.linalg.norm(plain - expected) > 1e-3


# --- Unbiasedness, by summing over every group that a one-token policy can sample. ---

TOKEN_REWARDS = np.array([0.0, 0.0, 1.0, 0.0])


def expected_gradient(
    theta: Array, size: int, advantages: Callable[[list[float]], list[float]], rewards: Array
) -> Array:
    """Return E[mean_i A_i * grad log pi(token_i)] over all groups of `size` tokens."""
    p = np.exp(log_policy(theta[None]))[0]
    total = np.zeros_like(theta)
    for tokens in product(range(len(theta)), repeat=size):
        chance = np.prod(p[list(tokens)])
        coefficients = advantages([float(rewards[t]) for t in tokens])
        for token, a in zip(tokens, coefficients, strict=True):
            score = -p.copy()
            score[token] += 1.0
            total += chance * a * score / size
    return total


def estimate(name: str) -> Callable[[list[float]], list[float]]:
    return lambda rewards: get_estimator(name).advantages(
        [GroupRewards(rewards_G=tuple(rewards), lengths_G=(1,) * len(rewards))], 0.3
    )[0]


def objective_gradient(theta: Array, objective: Callable[[Array], float]) -> Array:
    return central_differences(lambda t: objective(np.exp(log_policy(t[None]))[0]), theta)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rloo_is_an_unbiased_gradient_of_the_expected_reward(size: int) -> None:
    theta, rewards = np.array([0.3, -0.2, 0.1]), np.array([0.2, 1.0, -0.5])
    expected = objective_gradient(theta, lambda p: float(p @ rewards))
    got = expected_gradient(theta, size, estimate("rloo"), rewards)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)
    shrunk = expected_gradient(theta, size, estimate("dr_grpo"), rewards)
    np.testing.assert_allclose(shrunk, expected * (size - 1) / size, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["constant_baseline", "running_mean"])
def test_fixed_baselines_are_unbiased(name: str) -> None:
    theta, rewards = np.array([0.3, -0.2, 0.1]), np.array([0.2, 1.0, -0.5])
    expected = objective_gradient(theta, lambda p: float(p @ rewards))
    np.testing.assert_allclose(expected_gradient(theta, 2, estimate(name), rewards), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("size", "k"), [(2, 2), (4, 2), (4, 3), (4, 4)])
def test_best_of_k_is_an_unbiased_gradient_of_the_expected_best(size: int, k: int) -> None:
    theta, rewards = np.array([0.3, -0.2, 0.1]), np.array([0.2, 1.0, -0.5])

    def best(p: Array) -> float:
        return float(sum(np.prod(p[list(t)]) * max(rewards[i] for i in t) for t in product(range(len(p)), repeat=k)))

    got = expected_gradient(theta, size, lambda r: max_at_k(r, k=k), rewards)
    np.testing.assert_allclose(got, objective_gradient(theta, best), rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_maxrl_is_an_unbiased_gradient_of_the_truncated_log_likelihood(size: int) -> None:
    """log p = -sum_k (1 - p)^k / k, cut after G - 1 terms."""
    theta = np.array([0.3, -0.2, 0.1, 0.4])

    def truncated(p: Array) -> float:
        success = float(p @ TOKEN_REWARDS)
        return -sum((1 - success) ** k / k for k in range(1, size))

    got = expected_gradient(theta, size, estimate("maxrl"), TOKEN_REWARDS)
    np.testing.assert_allclose(got, objective_gradient(theta, truncated), rtol=0, atol=1e-9)
