from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.learner.builders import random_group, trajectory
from tests.toys import tiny_model, toy_tokenizer
from thundersyncrl.algorithms.estimator import estimator_names, get_estimator
from thundersyncrl.algorithms.weights import Normalizer
from thundersyncrl.certify import SABOTAGES, CertifyReport, certify, subjects
from thundersyncrl.certify.arrivals import What, arrivals
from thundersyncrl.certify.cases import Batch, RewardKind, tiny_batch, tiny_trajectories
from thundersyncrl.certify.compare import relative_errors
from thundersyncrl.certify.reference import PlainModel, batch_gradients, plain_copy, sequence_logprobs, surrogate
from thundersyncrl.certify.report import Case
from thundersyncrl.certify.streaming import streamed_gradient
from thundersyncrl.certify.subjects import STREAMS
from thundersyncrl.cli import app
from thundersyncrl.config import Config, parse_config
from thundersyncrl.errors import ConfigError
from thundersyncrl.learner.objective import Objective
from thundersyncrl.learner.policy import make_policy


def silent(line: str) -> None:
    """Hear nothing."""


def only(estimator: str, *overrides: str) -> Config:
    return parse_config({}, [f"algorithm.estimator={estimator}", *overrides])


def numbers(row: dict[str, Any]) -> tuple[float, float]:
    return row["error"], math.inf if row["tolerance"] is None else row["tolerance"]


# -- the verdict -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> CertifyReport:
    """The tiny certificate of one estimator: three families, 20 orders."""
    return certify(only("grpo"), tiny=True, progress=silent)


def test_one_estimator_passes_with_room_to_spare(report: CertifyReport) -> None:
    found = report.to_json()
    assert found["verdict"] == "pass"
    assert found["worst"]["float64"] <= 1e-12
    assert found["worst"]["float32"] <= 2e-6
    assert found["worst_offset"] <= 1e-5
    assert 1e-9 < found["control"] < 2e-6
    assert found["cases"] == len(report.cases) >= 3 * 20 * 2


def test_every_level_order_and_kind_of_training_is_compared(report: CertifyReport) -> None:
    double = {(c.train, c.stream, c.order) for c in report.cases if c.dtype == "float64"}
    assert double == {(t, s, o) for t in ("full", "lora") for s in STREAMS for o in range(20)}
    single = {(c.stream, c.order) for c in report.cases if c.dtype == "float32" and c.rewards is not RewardKind.OFFSET}
    assert single == {(s, o) for s in STREAMS for o in range(20)}
    assert {c.model for c in report.cases} == {"llama", "qwen2", "qwen3"}
    assert {c.rewards for c in report.cases} == set(RewardKind)
    assert {c.dtype for c in report.cases} == {"float64", "float32", "bfloat16"}


def test_every_class_of_work_runs(report: CertifyReport) -> None:
    assert set(report.num_packs) == {"final", "known", "content", "early"}
    assert min(report.num_packs.values()) > 50


def test_rows_tell_of_every_parameter_kind(report: CertifyReport) -> None:
    rows = report.to_json()["rows"]
    kinds = {row["name"] for row in rows if row["by"] == "parameters"}
    assert kinds == {"embeddings", "attention", "mlp", "norms", "head", "lora_A", "lora_B"}
    assert {row["name"] for row in rows if row["by"] == "estimator"} == {"grpo", "grpo +10,000"}
    assert all(row["ok"] for row in rows)
    for row in rows:
        error, tolerance = numbers(row)
        assert 0 < error <= tolerance
    assert "pass" in report.table().splitlines()[-1]


@pytest.mark.slow
def test_all_estimators_pass_on_all_tiny_models() -> None:
    """In 5 orders each; the command takes 20, as the module's report does for one estimator."""
    found = certify(None, tiny=True, num_orders=5, progress=silent)
    assert found.verdict == "pass", found.table()
    assert {c.estimator for c in found.cases} == {*estimator_names(), "cispo, weights <= 1.2"}
    assert found.worst["float64"] <= 1e-10
    assert found.worst["float32"] <= 2e-6
    assert found.worst_offset <= 1e-5


# -- it can fail -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SABOTAGES)
def test_every_sabotage_is_noticed(name: str) -> None:
    found = certify(only("grpo"), tiny=True, sabotage=name, progress=silent)
    assert found.verdict == "fail"
    assert found.to_json()["failures"]
    worst = max(found.worst["float64"], found.worst_offset)
    assert worst > 1e-4  # far beyond any tolerance
    if name == "naive_offset":  # the same algebra: only float32 with an offset can tell
        assert {c.rewards for c in found.failed} == {RewardKind.OFFSET}
        assert found.worst["float64"] < 1e-12
    if name == "cut_adjoint":  # the head lies behind the boundary
        head = [row for row in found.to_json()["rows"] if row["name"] == "head"]
        assert head
        assert all(row["ok"] for row in head)


def test_sabotage_ends_with_the_certificate() -> None:
    certify(only("grpo"), tiny=True, sabotage="cut_adjoint", progress=silent)
    subject = subjects.tiny_subjects(only("grpo"), families=("llama",), num_orders=1)[0]
    policy, batch, objective = subject.load("float64"), subject.batches[RewardKind.GRADED], subject.objectives["grpo"]
    kinds = ["all parameters"] * len(policy.trained)
    plain = plain_copy(policy, dtype=torch.float64)
    wanted = {"it": surrogate(objective, batch, baseline=0.3)}
    reference = batch_gradients(plain, batch.trajectories, wanted, temperature=subject.temperature)["it"]
    streamed = streamed_gradient(policy, objective, batch, stream="trajectory", order=0, baseline=0.3)
    assert relative_errors(streamed.gradient, reference, kinds)["all"] < 1e-12


def test_an_unknown_sabotage_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"cut_adjoint.*stale_coefficient.*got 'cut_adjiont'"):
        certify(None, tiny=True, sabotage="cut_adjiont", progress=silent)


def test_neither_config_nor_tiny_is_refused() -> None:
    with pytest.raises(ConfigError, match="config"):
        certify(None, tiny=False, progress=silent)


def test_a_refusal_in_a_step_is_a_failed_case_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimator that lies about its class fails its certificate; the report is still valid JSON."""
    from thundersyncrl.algorithms import estimator as registry

    liar = replace(get_estimator("pass_at_k_continuous"), name="liar", coefficient=get_estimator("grpo").coefficient)
    monkeypatch.setitem(registry._REGISTRY, "liar", liar)
    found = certify(only("liar"), tiny=True, sabotage="double_count", progress=silent)
    assert found.verdict == "fail"
    text = json.dumps(found.to_json(), allow_nan=False)
    assert "CoefficientClassError" in text
    assert json.loads(text)["worst"]["float64"] is None
    assert "CoefficientClassError" in found.table()


def case(**changes: Any) -> Case:
    settings: dict[str, Any] = {
        "model": "m",
        "train": "full",
        "dtype": "float32",
        "estimator": "grpo",
        "rewards": RewardKind.GRADED,
        "stream": "batch",
        "order": 0,
        "errors": {"mlp": 1e-7, "all": 1e-7},
        "control": {"mlp": 1e-7, "all": 1e-7},
    }
    return Case(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({"errors": {"mlp": 3e-6, "all": 1e-7}}, False),
        ({"errors": {"mlp": 1e-7, "all": 3e-6}}, False),
        ({"errors": {"mlp": 1e-7, "all": math.inf}}, False),
        ({"errors": {"mlp": 1e-7, "all": math.nan}}, False),
        ({"errors": {"mlp": 1e-7, "all": 3e-6}, "control": {"mlp": 1e-7, "all": 2e-6}}, True),
        ({"dtype": "float64", "errors": {"all": 9e-11}, "control": {}}, True),
        ({"dtype": "float64", "errors": {"all": 2e-10}, "control": {}}, False),
        ({"rewards": RewardKind.OFFSET, "errors": {"all": 9e-6}}, True),
        ({"rewards": RewardKind.OFFSET, "errors": {"all": 2e-5}}, False),
        ({"reason": "PhaseError"}, False),
    ],
)
def test_tolerances(changes: dict[str, Any], passes: bool) -> None:
    assert case(**changes).passes == passes
    report = CertifyReport(cases=[case(), case(**changes)], num_packs={}, seconds=0.0)
    assert report.verdict == ("pass" if passes else "fail")


def test_bfloat16_is_reported_and_never_claimed() -> None:
    rough = case(dtype="bfloat16", errors={"all": 0.1})
    assert CertifyReport(cases=[case(), rough], num_packs={}, seconds=0.0).verdict == "pass"
    alone = CertifyReport(cases=[rough], num_packs={}, seconds=0.0)
    assert alone.verdict == "fail"  # nothing was judged
    assert alone.worst == {"bfloat16": 0.1}


# -- the reference -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        # advantages 1/2, -1/2 (2 and 6 tokens) and -1, 1 (1 and 3 tokens): 12 tokens, 4 trajectories
        (Normalizer(name="token"), [0.5 / 12, -0.5 / 12, -1 / 12, 1 / 12]),
        (Normalizer(name="trajectory"), [0.5 / 8, -0.5 / 24, -1 / 4, 1 / 12]),
        (Normalizer(name="constant", constant_length=10), [0.5 / 40, -0.5 / 40, -1 / 40, 1 / 40]),
    ],
    ids=["token", "trajectory", "constant"],
)
def test_coefficients_are_those_of_the_formula(normalizer: Normalizer, expected: list[float]) -> None:
    lengths = {(0, 0): 2, (0, 1): 6, (1, 0): 1, (1, 1): 3}
    members = tuple(trajectory([([1, 2], [3] * n)], group=g, member=m) for (g, m), n in lengths.items())
    lost = trajectory([([1, 2], [3] * 5)], group=1, member=2)
    rewards = {t.id: r for t, r in zip(members, [1.0, 0.0, 0.0, 2.0], strict=True)}
    batch = Batch(trajectories=(*members, lost), rewards=rewards)
    objective = Objective(estimator=get_estimator("dr_grpo"), normalizer=normalizer)
    assert list(surrogate(objective, batch, baseline=0.0).coefficients.values()) == pytest.approx(expected)


def test_dynamic_sampling_leaves_uniform_groups_out_of_the_divisor() -> None:
    batch = tiny_batch(tiny_trajectories(vocab_size=30, seed=0), RewardKind.GRADED, seed=0)
    token = Normalizer(name="token")
    kept = surrogate(Objective(estimator=get_estimator("cispo"), normalizer=token), batch, baseline=0.0)
    dropped = surrogate(Objective(estimator=get_estimator("dapo"), normalizer=token), batch, baseline=0.0)
    counts = {t.id: t.num_action_tokens for t in batch.trajectories if t.id in batch.rewards}
    ratio = sum(counts.values()) / sum(n for id, n in counts.items() if id.group != 2)
    for id, coefficient in dropped.coefficients.items():
        assert coefficient == pytest.approx(kept.coefficients[id] * ratio)
    assert ratio > 1.1


def test_the_reference_gradient_is_that_of_central_differences() -> None:
    subject = subjects.tiny_subjects(only("dr_grpo"), families=("qwen3",), num_orders=1)[0]
    batch = subject.batches[RewardKind.GRADED]
    plain = plain_copy(subject.load("float64"), dtype=torch.float64)
    wanted = surrogate(replace(subject.objectives["dr_grpo"], importance_cap=None), batch, baseline=0.0)
    gradient = batch_gradients(plain, batch.trajectories, {"it": wanted}, temperature=1.0)["it"]

    def objective(model: PlainModel) -> float:
        return sum(
            c * float(sequence_logprobs(model, t, temperature=1.0).detach().sum())
            for t in batch.trajectories
            if (c := wanted.coefficients.get(t.id, 0.0))
        )

    draw = torch.Generator().manual_seed(0)
    for parameter, exact in zip(plain.parameters, gradient, strict=True):
        direction = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        with torch.no_grad():
            parameter.add_(direction, alpha=1e-5)
            above = objective(plain)
            parameter.add_(direction, alpha=-2e-5)
            below = objective(plain)
            parameter.add_(direction, alpha=1e-5)
        assert float((direction * exact).sum()) == pytest.approx((above - below) / 2e-5, rel=1e-5, abs=1e-8)


def test_no_reference_is_zero() -> None:
    for kind in RewardKind:
        batch = tiny_batch(tiny_trajectories(vocab_size=30, seed=0), kind, seed=0)
        for name in estimator_names():
            if kind is not RewardKind.BINARY and name == "pass_at_k":
                continue
            objective = Objective(estimator=get_estimator(name), normalizer=Normalizer(name="token"))
            coefficients = surrogate(objective, batch, baseline=0.3).coefficients
            assert sum(abs(c) > 1e-9 for c in coefficients.values()) >= 2, (name, kind)


def test_the_copy_uses_its_own_attention_and_leaves_the_policy_alone() -> None:
    policy = make_policy(tiny_model(vocab_size=30), dtype=torch.float32)
    digest = policy.digest()
    plain = plain_copy(policy, dtype=torch.float64)
    assert {p.dtype for p in plain.parameters} == {torch.float64}
    with torch.no_grad():
        plain.parameters[0].zero_()
    assert policy.digest() == digest
    assert plain.model.config._attn_implementation == "sdpa"
    assert policy.model.config._attn_implementation == "thundersync"


# -- arrivals ----------------------------------------------------------------------------------------------------------


def test_arrival_orders_are_complete_causal_and_different() -> None:
    batch = tiny_batch(tiny_trajectories(vocab_size=30, seed=0), RewardKind.GRADED, seed=0)
    orders = [arrivals(batch, seed) for seed in range(20)]
    assert len({tuple((e.what, e.member) for e in order) for order in orders}) == 20
    for order in orders:
        place = {(e.what, e.member): index for index, e in enumerate(order)}
        assert sum(e.what is What.SEAL for e in order) == 1
        for t in batch.trajectories:
            end = What.REWARD if t.id in batch.rewards else What.LOSS
            assert (end, t.id) in place
            assert place.get((What.TEXT, t.id), -1) < place[end, t.id]
    assert any(
        [e.member for e in order if e.what is What.TEXT and e.member in batch.rewards]
        != [e.member for e in order if e.what is What.REWARD]
        for order in orders
    )


def test_the_tiny_step_has_every_odd_case() -> None:
    members = tiny_trajectories(vocab_size=30, seed=0)
    batch = tiny_batch(members, RewardKind.GRADED, seed=0)
    assert batch.lost
    assert {len(t.turns) for t in members} >= {1, 2, 3}
    assert {t.num_action_tokens for t in members} >= {0, 1}
    assert 1 in {len(t.prompt_ids) for t in members}
    assert len({group[0].prompt_ids for group in batch.groups.values()}) == len(batch.groups)
    uniform = [
        len({batch.rewards[t.id] for t in group if t.id in batch.rewards}) == 1 for group in batch.groups.values()
    ]
    assert uniform == [False, False, True]


# -- commands and configs ----------------------------------------------------------------------------------------------


def test_the_command_prints_one_object_and_its_exit_code_is_the_verdict() -> None:
    run = CliRunner().invoke(
        app, ["certify", "--tiny", "algorithm.estimator=raft", "--sabotage", "drop_trajectory", "--json"]
    )
    assert run.exit_code == 1
    found = json.loads(run.stdout)
    assert (found["verdict"], found["sabotage"]) == ("fail", "drop_trajectory")
    assert {"worst", "cases", "control", "worst_offset", "tolerances", "rows"} <= found.keys()


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("estimator", ["grpo", "pass_at_k"])
def test_a_config_certifies_its_own_model(
    train: str, estimator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model, kind of training, normalizer, temperature and weights are the config's; the trajectories stand in here."""
    tiny_model("qwen2", vocab_size=300, seed=3).save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    config = only(
        estimator,
        f"model={tmp_path}",
        f"model.train={train}",
        "rollout.temperature=0.8",
        "algorithm.normalizer=trajectory",
        "algorithm.importance_cap=1.5",
    )
    sizes: list[tuple[int, int]] = []

    def sampled(of: Config, folder: Path, *, num_groups: int, group_size: int, progress: Any) -> Any:
        sizes.append((num_groups, group_size))
        draw = random.Random(0)
        return tuple(t for g in range(num_groups) for t in random_group(draw, group=g, size=group_size, prompt=9))

    monkeypatch.setattr(subjects, "sample_groups", sampled)
    lines: list[str] = []
    found = certify(config, tiny=False, progress=lines.append)
    assert found.verdict == "pass", found.table()
    assert {c.dtype for c in found.cases} == {"float64", "float32"}
    assert {c.train for c in found.cases} == {train}
    assert {c.estimator for c in found.cases} == {estimator}
    assert {c.stream for c in found.cases} == set(STREAMS)
    assert len({c.order for c in found.cases}) == 3
    assert sizes == [(2, 5 if estimator == "pass_at_k" else 4)]
    assert lines
