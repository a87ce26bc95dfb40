from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.learner.builders import (
    STREAMS,
    VOCABULARY,
    Probe,
    gradient_of,
    learner_of,
    open_step,
    plain_gradient,
    plain_logprobs,
    plain_model,
    policy_of,
    random_group,
    relative_error,
    run_step,
    trajectory,
    work,
)
from thundersyncrl.algorithms.estimator import CoefficientClass, Estimator, estimator_names, get_estimator
from thundersyncrl.config import LearnerConfig
from thundersyncrl.errors import ContractError, NumericsError
from thundersyncrl.learner.attention import AttentionPlan, PrefixPlan
from thundersyncrl.learner.optimizer import PolicyOptimizer
from thundersyncrl.learner.policy import Policy
from thundersyncrl.learner.prompt import Prompt
from thundersyncrl.records import Trajectory


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A float64 policy that no test here trains."""
    return policy_of()


class Forwards:
    """Counts forwards by kind of plan, and the tokens that branches ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.prompts: Counter[tuple[int, ...]] = Counter()
        self.branch_tokens = 0
        self.walks = 0
        hidden, walk = Policy.hidden, Prompt.walk

        def counted(of: Policy, token_ids: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
            if isinstance(plan, PrefixPlan):
                self.prompts[tuple(token_ids[0].tolist())] += 1
            else:
                self.branch_tokens += token_ids.numel()
            return hidden(of, token_ids, positions, plan)

        def counted_walk(prompt: Prompt, adjoints: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
            self.walks += 1
            return walk(prompt, adjoints, parameters)

        monkeypatch.setattr(Policy, "hidden", counted)
        monkeypatch.setattr(Prompt, "walk", counted_walk)


# -- what is forwarded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(("graph_tokens", "forwards"), [(1000, 1), (0, 2)])
def test_a_prompt_runs_once_and_is_walked_once(
    policy: Policy, stream: str, graph_tokens: int, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice forward only where its graph has no room to wait."""
    draw = random.Random(1)
    groups = [random_group(draw, group=g, prompt=4 + g) for g in range(2)]
    counted = Forwards(monkeypatch)
    run_step(learner_of(policy, stream=stream, graph_tokens=graph_tokens), [*groups[0], *groups[1]], [1, 0, 0.5, 0] * 2)
    expected = {group[0].prompt_ids[:-1]: forwards for group in groups}
    assert dict(counted.prompts) == expected
    assert counted.walks == 2


def test_prompts_share_the_room_for_graphs(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    groups = [random_group(draw, group=g, prompt=6) for g in range(2)]
    counted = Forwards(monkeypatch)
    run_step(learner_of(policy, graph_tokens=8), [*groups[0], *groups[1]], [1, 0, 0.5, 0] * 2)
    assert sorted(counted.prompts.values()) == [1, 2]


@pytest.mark.parametrize("stream", ["batch", "group"])
def test_zero_advantages_are_never_forwarded(policy: Policy, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform group, and the middle one of three rewards in a group that isn't."""
    draw = random.Random(2)
    uniform, mixed = random_group(draw, group=0), random_group(draw, group=1, size=3)
    counted = Forwards(monkeypatch)
    metrics = run_step(
        learner_of(policy, estimator="rloo", stream=stream), [*uniform, *mixed], [1.0] * 4 + [0.0, 0.5, 1.0]
    )
    assert list(counted.prompts) == [mixed[0].prompt_ids[:-1]]
    # the last prompt token runs in the branch, the last token nowhere
    assert counted.branch_tokens == sum(len(t.token_ids) - len(t.prompt_ids) for t in (mixed[0], mixed[2]))
    assert metrics["num_skipped"] == 5


def test_rewards_that_are_in_before_any_work_spare_a_uniform_group_at_trajectory_level(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = random_group(random.Random(2))
    counted = Forwards(monkeypatch)
    learner = learner_of(policy)
    open_step(learner, members)
    for t in members:
        learner.text(t)
        learner.reward(t.id, 1.0)
    learner.seal()
    work(learner)
    learner.finish_step()
    assert (counted.branch_tokens, counted.prompts, counted.walks) == (0, Counter(), 0)


def test_a_group_that_turns_out_uniform_is_not_walked(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    members = random_group(random.Random(2))
    counted = Forwards(monkeypatch)
    learner = learner_of(policy)
    run_step(learner, members, [1.0] * 4)
    assert counted.branch_tokens > 0
    assert counted.walks == 0
    assert all(not g.any() for g in gradient_of(learner))


# -- open groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [5, 1])
def test_past_the_limit_of_open_groups_work_waits_for_its_group_and_the_update_is_the_same(
    policy: Policy, prompt: int
) -> None:
    """Also where a prompt of one token leaves nothing shared that would mark its group as open."""
    draw = random.Random(4)
    members = [t for g in range(3) for t in random_group(draw, group=g, prompt=prompt)]
    rewards = [float(draw.random()) for _ in members]
    metrics: list[dict[str, float]] = []
    learners = [learner_of(policy, max_open_groups=limit) for limit in (64, 1)]
    for learner in learners:
        open_step(learner, members)
        for t in members:
            learner.text(t)
        work(learner)
        # the group that came first is the last to get its rewards
        for t, reward in reversed(list(zip(members, rewards, strict=True))):
            learner.reward(t.id, reward)
            work(learner)
        learner.seal()
        work(learner)
        metrics.append(learner.finish_step())
    wide, narrow = metrics
    assert (wide["num_final_packs"], wide["num_content_packs"]) == (0, 12)
    assert narrow["num_final_packs"] > 0
    assert 0 < narrow["num_content_packs"] <= 4
    assert relative_error(*(gradient_of(learner) for learner in learners)) < 1e-13


# -- steps without signal ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", [n for n in estimator_names() if n not in ("constant_baseline", "running_mean")])
def test_a_step_without_signal_leaves_every_bit_of_the_parameters(stream: str, name: str) -> None:
    """Case H-08: AdamW with weight decay, after a step that filled its moments; all rewards are 0."""
    policy = policy_of(dtype=torch.float32)
    optimizer = PolicyOptimizer(policy.trained, LearnerConfig(learning_rate=1e-2, weight_decay=0.1), total_steps=10)
    learner = learner_of(policy, estimator=name, optimizer=optimizer, stream=stream)
    size, draw = 6, random.Random(3)
    run_step(learner, random_group(draw, size=size), [1.0] + [0.0] * (size - 1))
    before = {n: p.detach().clone() for n, p in policy.trained.items()}
    second = [t for g in range(2) for t in random_group(draw, group=g, size=size, step=1)]
    metrics = run_step(learner, second, [0.0] * (2 * size))
    assert all(torch.equal(before[n], p) for n, p in policy.trained.items())
    assert metrics["zero_signal_group_fraction"] == 1.0
    assert metrics["gradient_norm"] == 0.0
    assert learner.version == 2


def test_a_group_with_too_few_survivors_is_dropped_and_counted(policy: Policy) -> None:
    draw = random.Random(5)
    kept, broken = random_group(draw, group=0), random_group(draw, group=1)
    rewards = {t.id: r for t, r in zip(kept, [1.0, 0.0, 0.5, 0.0], strict=True)}
    learner = learner_of(policy)
    metrics = run_step(learner, [*kept, *broken], {**rewards, broken[2].id: 1.0})
    assert (metrics["num_survivors"], metrics["num_dropped"], metrics["num_lost"]) == (4, 1, 3)
    only = learner_of(policy)
    run_step(only, kept, rewards)
    assert relative_error(gradient_of(learner), gradient_of(only)) < 1e-13


def test_a_step_whose_every_trajectory_is_lost_moves_nothing(policy: Policy) -> None:
    learner = learner_of(policy)
    metrics = run_step(learner, random_group(random.Random(5)), {})
    assert all(not g.any() for g in gradient_of(learner))
    assert (metrics["num_lost"], metrics["num_survivors"]) == (4, 0)


# -- small and empty trajectories --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
def test_a_lone_end_token_is_trained_and_an_empty_trajectory_only_counts_its_reward(stream: str) -> None:
    """Case H-13: actions [eos], [], [5 eos], [6 7 eos] with rewards 0, 0, 1, 1."""
    policy = policy_of(dtype=torch.float32)
    optimizer = PolicyOptimizer(policy.trained, LearnerConfig(learning_rate=1e-4), total_steps=1)
    learner = learner_of(policy, optimizer=optimizer, stream=stream)
    prompt, end = [9, 8, 2, 7], 2
    members = [trajectory([(prompt, acted)], member=m) for m, acted in enumerate([[end], [], [5, end], [6, 7, end]])]

    def stops_at_once() -> float:
        return float(plain_logprobs(plain_model(policy), members[0])[0].detach())

    before = stops_at_once()
    metrics = run_step(learner, members, [0.0, 0.0, 1.0, 1.0])
    assert stops_at_once() < before
    assert metrics["num_survivors"] == 4


def test_the_reward_of_an_empty_trajectory_is_in_the_baseline(policy: Policy) -> None:
    members = [trajectory([([9, 8], acted)], member=m) for m, acted in enumerate([[], [3, 4], [5]])]
    learner = learner_of(policy, estimator="dr_grpo")
    run_step(learner, members, [3.0, 1.0, 0.0])
    # the mean is 4/3 with it, 1/2 without it
    model = plain_model(policy)
    loss = (1 - 4 / 3) * plain_logprobs(model, members[1]).sum() - 4 / 3 * plain_logprobs(model, members[2]).sum()
    expected = torch.autograd.grad(loss / 3, list(model.parameters()))
    assert relative_error(gradient_of(learner), expected) < 1e-12


# -- events ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(policy: Policy, reward: float) -> None:
    members = random_group(random.Random(0))
    learner = learner_of(policy)
    open_step(learner, members)
    learner.text(members[0])
    with pytest.raises(NumericsError, match="finite reward"):
        learner.reward(members[0].id, reward)


@pytest.mark.parametrize("name", estimator_names())
def test_losing_a_member_whose_gradient_is_held_leaves_no_trace_of_it(policy: Policy, name: str) -> None:
    members = random_group(random.Random(9), size=7)
    lost = members[3]
    rewards = {t.id: float(t.id.member == 5) for t in members if t is not lost}
    learner = learner_of(policy, estimator=name)
    metrics = run_step(learner, members, rewards)
    assert metrics["num_content_trajectories"] == 7
    expected = plain_gradient(policy, get_estimator(name), members, rewards)
    assert relative_error(gradient_of(learner), expected) < 1e-12


def test_a_member_that_never_had_a_text_can_be_lost(policy: Policy) -> None:
    members = random_group(random.Random(9))
    learner = learner_of(policy)
    open_step(learner, members)
    learner.lose(members[0].id)
    for t, reward in zip(members[1:], [1.0, 0.0, 0.5], strict=True):
        learner.text(t)
        learner.reward(t.id, reward)
    learner.seal()
    work(learner)
    assert learner.finish_step()["num_lost"] == 1
    expected = plain_gradient(
        policy, get_estimator("grpo"), members, {t.id: r for t, r in zip(members[1:], [1.0, 0.0, 0.5], strict=True)}
    )
    assert relative_error(gradient_of(learner), expected) < 1e-12


def test_members_of_a_group_with_different_prompts_are_refused(policy: Policy) -> None:
    learner = learner_of(policy)
    members = [trajectory([([1, 2, 3], [4])], member=0), trajectory([([1, 9, 3], [4])], member=1)]
    open_step(learner, members)
    learner.text(members[0])
    learner.text(members[1])
    with pytest.raises(ContractError, match="share their prompt"):
        work(learner)


def test_metrics_account_for_every_trajectory(policy: Policy) -> None:
    draw = random.Random(1)
    members = [t for g in range(3) for t in random_group(draw, group=g)]
    rewards = {t.id: float(t.id.group == 1 or t.id.member % 2) for t in members[:-1]}
    metrics = run_step(learner_of(policy, stream="group"), members, rewards)
    assert metrics["num_survivors"] + metrics["num_dropped"] + metrics["num_lost"] == 12
    forwarded = sum(metrics[f"num_{kind}_trajectories"] for kind in ("final", "known", "content"))
    assert forwarded + metrics["num_skipped"] == metrics["num_survivors"]
    assert metrics["num_skipped"] == 4
    assert metrics["zero_signal_group_fraction"] == pytest.approx(1 / 3)


def test_the_mean_log_prob_is_that_of_the_scored_tokens(policy: Policy) -> None:
    members = random_group(random.Random(1))
    metrics = run_step(learner_of(policy), members, [1.0, 0.0, 0.0, 0.0])
    exact = torch.cat([plain_logprobs(plain_model(policy), t) for t in members])
    assert metrics["logprob_mean"] == pytest.approx(float(exact.mean()), rel=1e-12)


# -- through the boundary ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_last_token_reaches_the_first_prompt_token_in_every_layer(family: Any) -> None:
    """A severed channel: the adjoint on the keys and values of prompt token 0 is that of one plain backward."""
    policy = policy_of(family)
    t = trajectory([([3, 1, 4, 1, 5], [9, 2]), ([6, 5], [3])])
    seen: list[Tensor] = []
    walk = Prompt.walk

    def caught(prompt: Prompt, adjoints: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        seen.extend(a.clone() for a in adjoints)
        return walk(prompt, adjoints, parameters)

    last_only = Estimator(
        name="last", coefficient=CoefficientClass.KNOWN, advantages=lambda groups, _: [[1.0] for _ in groups]
    )
    learner = learner_of(policy, estimator=last_only, importance_cap=2.0)
    # weights exp(learner - behavior) of 0 but for the last token's: the loss is on that token alone
    weighted = trajectory([(u.observation_ids, u.action_ids) for u in t.turns], logprobs=[800.0, 800.0, -800.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prompt, "walk", caught)
        run_step(learner, [weighted], [1.0])
    exact = keys_and_values_gradient(policy, t)
    assert len(seen) == len(exact) == 2 * 2
    for adjoint, gradient in zip(seen, exact, strict=True):
        torch.testing.assert_close(adjoint, 2.0 * gradient, rtol=1e-10, atol=1e-14)
        assert float(adjoint[:, :, 0].norm()) > 1e-6


def keys_and_values_gradient(policy: Policy, t: Trajectory) -> list[Tensor]:
    """Return d log pi(last token) / d (keys, values) of the shared prompt tokens, from attention written out."""
    num_shared = len(t.prompt_ids) - 1
    kept: list[list[Tensor]] = [[], []]

    class Keeping(PrefixPlan):
        def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            # leaves in the place of the prompt's keys and values: only what flows directly from later tokens counts
            shared = [x[:, :, :num_shared].detach().requires_grad_(True) for x in (key, value)]
            for store, leaf in zip(kept, shared, strict=True):
                store.append(leaf)
            own = [torch.cat([s, x[:, :, num_shared:]], 2) for s, x in zip(shared, (key, value), strict=True)]
            return super().attend(layer, query, own[0], own[1], scaling)

    ids = torch.tensor([t.token_ids])
    hidden = policy.hidden(ids, torch.arange(ids.shape[1])[None], Keeping())
    loss = policy.logits(hidden)[0, -2].log_softmax(-1)[ids[0, -1]]
    return list(torch.autograd.grad(loss, [*kept[0], *kept[1]]))


def test_the_vocabulary_of_these_tests_is_the_models(policy: Policy) -> None:
    assert policy.vocab_size == VOCABULARY
    assert Probe().ascend([]) == 0.0
