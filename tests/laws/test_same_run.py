"""Whole runs: the level of streaming, a resume, or the batch's neighbours change neither tokens nor weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs import RunSpec, VowelWorld, run_tiny
from thundersyncrl.config import LearnerConfig
from thundersyncrl.records import Reward


def largest_difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_twenty_steps_streamed_equal_twenty_steps_in_batch(lora: bool):
    batch = run_tiny(RunSpec(stream="batch", steps=20, lora=lora))
    streamed = run_tiny(RunSpec(stream="trajectory", steps=20, lora=lora))
    assert streamed.sampled == batch.sampled
    assert largest_difference(streamed.parameters, batch.parameters) <= 1e-8
    assert sum(r.metrics["num_final_trajectories"] for r in batch.recorder.reports) > 0
    early = sum(
        r.metrics["num_known_trajectories"] + r.metrics["num_content_trajectories"] for r in streamed.recorder.reports
    )
    assert early > 0, "no gradient was taken before its group closed"


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("graph_tokens", [64, 100_000])
def test_turn_level_equals_batch_level(lora: bool, graph_tokens: int):
    """With room for some early forwards, and with room for all."""
    batch = run_tiny(RunSpec(stream="batch", steps=4, lora=lora))
    turn = run_tiny(RunSpec(stream="turn", steps=4, lora=lora, graph_tokens=graph_tokens))
    assert turn.sampled == batch.sampled
    assert largest_difference(turn.parameters, batch.parameters) <= 1e-8
    early = sum(r.metrics["num_early_trajectories"] for r in turn.recorder.reports)
    assert early > 0 or graph_tokens == 64, "no turn ran forward before its trajectory ended"


def test_group_level_equals_batch_level():
    batch, group = (run_tiny(RunSpec(stream=stream, steps=4)) for stream in ("batch", "group"))
    assert group.sampled == batch.sampled
    assert largest_difference(group.parameters, batch.parameters) <= 1e-10


@pytest.mark.parametrize("lora", [False, True])
def test_whatever_auto_chooses_equals_batch_level(lora: bool):
    batch, auto = (run_tiny(RunSpec(stream=stream, steps=10, lora=lora)) for stream in ("batch", "auto"))
    assert auto.sampled == batch.sampled
    assert largest_difference(auto.parameters, batch.parameters) <= 1e-8
    assert all(": " in report.level for report in auto.recorder.reports), "a level without its reason"


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path: Path, lora: bool):
    """Case H-22."""
    spec = {"stream": "batch", "lora": lora, "dtype": torch.float32}
    whole = run_tiny(RunSpec(steps=6, **spec))
    run_tiny(RunSpec(steps=3, checkpoint_after=3, folder=tmp_path, **spec))
    rest = run_tiny(RunSpec(steps=6, first_step=3, folder=tmp_path, **spec))
    expected = {k: v for k, v in whole.sampled.items() if int(k.split("/")[0].split("=")[1]) >= 3}
    assert rest.sampled == expected
    assert largest_difference(rest.parameters, whole.parameters) == 0.0


def test_seeds_reach_the_sampler_and_the_task_order():
    """Case H-35."""
    one, again, other = (run_tiny(RunSpec(steps=1, seed=seed)).sampled for seed in (1, 1, 2))
    assert one == again
    assert one != other
    tasks = [
        [t.task.id for t in sorted(run_tiny(RunSpec(steps=1, data_seed=d)).recorder.trajectories, key=lambda t: t.id)]
        for d in (1, 3)
    ]
    assert tasks[0] != tasks[1]


def test_every_trained_token_has_the_version_at_which_its_gradient_is_taken():
    result = run_tiny(RunSpec(steps=3))
    for report in result.recorder.reports:
        versions = {t.version for t in result.recorder.trajectories if t.id.step == report.step}
        assert versions == {report.version}
    assert [r.version for r in result.recorder.reports] == [0, 1, 2]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_learner_and_engine_agree_on_every_logprob_over_a_whole_float32_run(lora: bool, temperature: float):
    """Cases H-10 and H-19: at any temperature, after every update."""
    result = run_tiny(RunSpec(steps=5, dtype=torch.float32, lora=lora, temperature=temperature))
    worst = [r.metrics["mismatch_max"] for r in result.recorder.reports]
    assert max(worst) < 1e-4
    assert max(worst) > 0.0, "nothing was compared"


def test_training_raises_the_reward_that_it_is_given():
    """A silent no-op would pass every equality above."""
    reports = run_tiny(
        RunSpec(steps=20, dtype=torch.float32, group_size=8, learner=LearnerConfig(learning_rate=5e-3))
    ).recorder.reports
    rewards = [r.metrics["reward_mean"] for r in reports]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05


def test_every_launched_trajectory_is_accounted_for():
    for report in run_tiny(RunSpec(steps=2)).recorder.reports:
        assert report.num_launched == 12
        assert report.num_trained + report.num_dropped + report.num_failed == 12


def test_dynamic_sampling_replaces_uniform_groups_under_the_same_version():
    result = run_tiny(RunSpec(steps=2, estimator="dapo", extra_groups=2, world=HalfUniform))
    report = result.recorder.reports[0]
    assert report.num_launched > 12
    assert {t.version for t in result.recorder.trajectories if t.id.step == 0} == {0}
    batch = run_tiny(RunSpec(steps=2, estimator="dapo", extra_groups=2, world=HalfUniform, stream="batch"))
    assert largest_difference(result.parameters, batch.parameters) <= 1e-10


class HalfUniform(VowelWorld):
    """Tasks with an even number give everybody reward 1."""

    async def grade(self) -> Reward:
        return Reward(value=1.0) if int(self._task.id[1:]) % 2 == 0 else await super().grade()
