"""Older versions' trajectories: weighed by truncated importance ratios, refused past the limit, and told in metrics."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.learner.builders import (
    gradient_of,
    learner_of,
    open_step,
    plain_logprobs,
    plain_model,
    policy_of,
    random_group,
    relative_error,
    run_step,
    trajectory,
    work,
)
from thundersyncrl.errors import NumericsError, StaleWorkError
from thundersyncrl.learner.policy import Policy
from thundersyncrl.records import Trajectory

VERSION = 5
STREAMS = ["batch", "group", "trajectory", "turn", "auto"]


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A float64 policy that no test here trains."""
    return policy_of()


def _mixed_group(policy: Policy, versions: Sequence[int], *, seed: int, group: int = 0) -> list[Trajectory]:
    """Return a group whose members were sampled under several versions, older ones with log-probs that are off."""
    draw, model = random.Random(seed), plain_model(policy)
    members: list[Trajectory] = []
    for t, version in zip(random_group(draw, group=group, size=len(versions)), versions, strict=True):
        off = 0.5 * (VERSION - version)
        sampled = [p + draw.uniform(-off, off) for p in plain_logprobs(model, t).tolist()]
        turns = [(turn.observation_ids, turn.action_ids) for turn in t.turns]
        members.append(trajectory(turns, group=group, member=t.id.member, version=version, logprobs=sampled))
    return members


def _expected(policy: Policy, members: Sequence[Trajectory], advantages: Sequence[float], *, cap: float) -> Any:
    """Return the token-mean gradient from one autograd call over plain transformers."""
    model = plain_model(policy)
    loss = torch.zeros((), dtype=torch.float64)
    for t, advantage in zip(members, advantages, strict=True):
        logprobs = plain_logprobs(model, t)
        stale = t.version != VERSION
        pairs = zip(logprobs.tolist(), t.behavior_logprobs, strict=True)
        ratios = [min(math.exp(p - b), cap) if stale else 1.0 for p, b in pairs]
        loss = loss + advantage * sum(r * p for r, p in zip(ratios, logprobs, strict=True))
    return torch.autograd.grad(loss / sum(t.num_action_tokens for t in members), list(model.parameters()))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_mix_of_versions_in_any_order_gives_the_truncated_weighted_gradient(data: st.DataObject) -> None:
    policy = policy_of()
    versions = data.draw(st.lists(st.integers(VERSION - 3, VERSION), min_size=4, max_size=4))
    stream = data.draw(st.sampled_from(STREAMS))
    members = _mixed_group(policy, versions, seed=data.draw(st.integers(0, 9)))
    rewards = data.draw(st.permutations([1.0, 0.0, 0.0, 0.0]))
    learner = learner_of(policy, estimator="rloo", stream=stream, max_staleness=3)
    learner.version = VERSION
    open_step(learner, members)
    for event in data.draw(st.permutations([(what, m) for m in range(4) for what in ("text", "reward")])):
        what, index = event
        if what == "text":  # a reward never comes before its text
            for num in range(1, len(members[index].turns)):
                learner.turn(members[index].id, members[index].turns[:num])
                work(learner)
            learner.text(members[index])
            learner.reward(members[index].id, rewards[index])
        work(learner)
    learner.seal()
    work(learner)
    learner.finish_step()
    expected = _expected(policy, members, [1.0 if r else -1 / 3 for r in rewards], cap=2.0)
    assert relative_error(gradient_of(learner), expected) < 1e-11


def test_a_cap_that_is_set_holds_for_older_versions_too(policy: Policy) -> None:
    members = _mixed_group(policy, [VERSION - 2] * 4, seed=3)
    learner = learner_of(policy, estimator="rloo", importance_cap=1.05, max_staleness=2)
    learner.version = VERSION
    run_step(learner, members, [1.0, 0.0, 0.0, 0.0])
    expected = _expected(policy, members, [1.0, -1 / 3, -1 / 3, -1 / 3], cap=1.05)
    assert relative_error(gradient_of(learner), expected) < 1e-11


@pytest.mark.parametrize("version", [VERSION - 3, VERSION + 1])
def test_a_version_outside_the_limit_is_refused(policy: Policy, version: int) -> None:
    (member, *_) = _mixed_group(policy, [version] * 4, seed=1)
    learner = learner_of(policy, max_staleness=2)
    learner.version = VERSION
    open_step(learner, [member])
    with pytest.raises(StaleWorkError, match=f"3 to 5, got version {version}"):
        learner.text(member)


def test_a_trajectory_of_two_versions_is_refused(policy: Policy) -> None:
    mixed = trajectory([([1, 2], [3]), ([4], [5])], version=VERSION)
    first = trajectory([([1, 2], [3])], version=VERSION - 1)
    learner = learner_of(policy, max_staleness=2)
    learner.version = VERSION
    open_step(learner, [mixed])
    with pytest.raises(StaleWorkError, match="one policy version, got 4 and then 5"):
        learner.turn(mixed.id, [first.turns[0], mixed.turns[1]])


def test_metrics_tell_how_old_trajectories_were_and_compare_only_those_of_the_learners_version(policy: Policy) -> None:
    members = _mixed_group(policy, [VERSION - 2, VERSION - 1, VERSION, VERSION], seed=2)
    learner = learner_of(policy, max_staleness=2)
    learner.version = VERSION
    metrics = run_step(learner, members, [1.0, 0.0, 1.0, 0.0])
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (0.75, 2.0)
    assert 0 <= metrics["capped_weights"] < 1
    assert metrics["mismatch_max"] < 1e-12
    assert "staleness_mean" not in run_step(learner_of(policy), random_group(random.Random(1)), [1.0, 0.0, 0.0, 0.0])


def test_a_mismatch_bound_still_guards_the_learners_own_version(policy: Policy) -> None:
    *older, own = _mixed_group(policy, [VERSION - 2] * 3 + [VERSION], seed=2)
    off = trajectory(
        [(turn.observation_ids, turn.action_ids) for turn in own.turns],
        member=3,
        version=VERSION,
        logprobs=[p - 0.2 for p in own.behavior_logprobs],
    )
    learner = learner_of(policy, max_staleness=2, max_mismatch=0.1)
    learner.version = VERSION
    with pytest.raises(NumericsError, match=r"within 0\.1 nats"):
        run_step(learner, [*older, off], [1.0, 0.0, 1.0, 0.0])
