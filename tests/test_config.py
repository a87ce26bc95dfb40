"""The config tree: what it reads, what it refuses and how it says so, and that its surface changes only on purpose."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.config import Config, LoraConfig, ModelConfig, TasksConfig, load_config, parse_config
from thundersyncrl.config_keys import flatten, keys_of, suggest
from thundersyncrl.config_toml import to_toml
from thundersyncrl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]

SURFACE = """
seed data_seed steps run checkpoint_every show_sample_every trackers placement
model model.path model.dtype model.train model.lora model.lora.rank model.lora.alpha model.lora.targets model.threads
algorithm algorithm.estimator algorithm.normalizer algorithm.constant_length algorithm.importance_cap
algorithm.kl_coefficient algorithm.overlong_tokens algorithm.extra_groups
learner learner.stream learner.pack_tokens learner.graph_tokens learner.early_tokens learner.max_open_groups
learner.learning_rate learner.schedule learner.warmup_steps learner.weight_decay learner.betas learner.eps
learner.max_grad_norm learner.max_mismatch
rollout rollout.groups_per_step rollout.group_size rollout.temperature rollout.top_p rollout.max_turns
rollout.max_turn_tokens rollout.max_action_tokens rollout.context_tokens rollout.max_concurrent rollout.cache_tokens
rollout.trajectory_limit_s rollout.max_retries rollout.max_staleness
environment environment.command_limit_s environment.verifier_limit_s environment.memory_mb environment.max_processes
environment.cpu_limit_s environment.disk_mb environment.output_chars environment.max_open
tasks tasks.train tasks.heldout tasks.kinds tasks.difficulties tasks.weights tasks.num_train tasks.num_heldout
warm_start warm_start.steps warm_start.batch_size warm_start.learning_rate warm_start.weights
evaluation evaluation.num_tasks evaluation.samples_per_task evaluation.temperature evaluation.every
"""


def refusal(data: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, overrides)
    return str(caught.value)


def test_the_surface_is_what_is_written_here() -> None:
    """A new key is a promise to users: add it here too, with a test of what it does."""
    assert {key.dotted for key in keys_of(Config)} == set(SURFACE.split())


def test_every_key_is_documented() -> None:
    assert [key.dotted for key in keys_of(Config) if not key.field.description] == []


def test_the_page_about_the_config_is_up_to_date() -> None:
    script = ROOT / "scripts" / "document_config.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("data", "overrides", "unknown", "meant"),
    [
        ({"learning_rte": 1e-5}, (), "learning_rte", "learner.learning_rate"),
        ({"rollout": {"temprature": 0.7}}, (), "rollout.temprature", "rollout.temperature"),
        ({}, ("rollout.temprature=0.7",), "rollout.temprature", "rollout.temperature"),
        ({}, ("learning_rte=1e-5",), "learning_rte", "learner.learning_rate"),
        ({"model": {"temperature": 0.7}}, (), "model.temperature", "rollout.temperature"),
        ({"rollout": {"learning_rate": 1.0}}, (), "rollout.learning_rate", "learner.learning_rate"),
        ({"rolout": {"temperature": 1.0}}, (), "rolout", "rollout"),
        ({"model": {"lora": {"rnk": 8}}}, (), "model.lora.rnk", "model.lora.rank"),
        ({"learner": {"alpha": 8}}, (), "learner.alpha", "model.lora.alpha"),
        ({"warm_start": {"stesp": 8}}, (), "warm_start.stesp", "warm_start.steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_key_that_was_meant(
    data: dict[str, Any], overrides: tuple[str, ...], unknown: str, meant: str
) -> None:
    """Case H-28."""
    message = refusal(data, *overrides)
    assert f"unknown key `{unknown}`" in message
    assert f"did you mean `{meant}`" in message


def test_a_key_like_no_other_is_refused_with_the_valid_ones() -> None:
    assert "valid keys are num_tasks, samples_per_task, temperature, every" in refusal({"evaluation": {"zzzzzz": 1}})


def test_a_name_in_several_sections_gives_them_all_in_order() -> None:
    assert suggest("learning_rate", "model", Config) == ["learner.learning_rate", "warm_start.learning_rate"]


def test_every_wrong_key_is_named_at_once() -> None:
    message = refusal({"stpes": 3, "rollout": {"group_size": "many"}, "model": {"dtype": "fp8"}})
    assert "did you mean `steps`" in message
    assert "`rollout.group_size`" in message
    assert "got 'many'" in message
    assert "`model.dtype`: expected 'float32', 'bfloat16' or 'float64', got 'fp8'" in message


def test_errors_inside_lists_and_unions_name_the_key() -> None:
    assert "`learner.betas[1]`" in refusal({"learner": {"betas": [0.9, "x"]}})
    assert "`model.lora.targets`" in refusal({"model": {"lora": {"targets": 3}}})
    assert "`tasks.kinds[0]`" in refusal({"tasks": {"kinds": [{"a": 1}]}})


def test_a_huge_wrong_value_is_cut_in_the_message() -> None:
    assert len(refusal({"steps": "x" * 10_000})) < 300


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"model": {"train": "full", "lora": {}}}, "`model.lora` has no effect"),
        ({"algorithm": {"normalizer": "token", "constant_length": 8}}, "`algorithm.constant_length` has no effect"),
        ({"evaluation": {"samples_per_task": 4}}, "`evaluation.samples_per_task = 4` has no effect"),
        ({"tasks": {"train": "somewhere", "num_train": 8}}, "`tasks.num_train` has no effect"),
        ({"tasks": {"heldout": "somewhere", "num_heldout": 8}}, "`tasks.num_heldout` has no effect"),
        ({"algorithm": {"overlong_tokens": 999}}, "`algorithm.overlong_tokens` of at most"),
        ({"rollout": {"group_size": 1}}, "a group of one has nothing to be compared with"),
        ({"rollout": {"top_p": 0.9}}, "expected `rollout.top_p` 1.0, got 0.9"),
        ({"learner": {"stream": "group", "early_tokens": 8}}, "`learner.early_tokens = 8` has no effect"),
        ({"learner": {"betas": [1.0, 1.0]}}, "less than 1"),
        ({"model": {"threads": 100000}}, "less than or equal to 1024"),
        ({"model": {"lora": {"targets": []}}}, "at least 1"),
        ({"rollout": {"temperature": 1e-300}}, "greater than or equal to 0.01"),
        ({"learner": {"stream": "weekly"}}, "'batch', 'group', 'trajectory', 'turn' or 'auto'"),
        ({"learner": {"learning_rate": float("nan")}}, "`learner.learning_rate`"),
        ({"learner": {"learning_rate": float("inf")}}, "`learner.learning_rate`"),
        ({"model": "somewhere"}, "`model`: expected a valid dictionary"),
    ],
)
def test_the_impossible_and_the_ineffective_are_refused(data: dict[str, Any], said: str) -> None:
    assert said in refusal(data)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("steps=7", "steps", 7),
        ("learner.learning_rate=2e-5", "learner.learning_rate", 2e-5),
        ("run=2024-05-01", "run", "2024-05-01"),
        ("run=7", "run", "7"),
        ('run="quoted"', "run", "quoted"),
        ("run=a=b", "run", "a=b"),
        ("model=some/folder", "model.path", "some/folder"),
        ("model.path=some/folder", "model.path", "some/folder"),
        ("model.lora.rank=4", "model.lora.rank", 4),
        ("model.lora.targets=q_proj", "model.lora.targets", "q_proj"),
        ('model.lora.targets=["q_proj","v_proj"]', "model.lora.targets", ("q_proj", "v_proj")),
        ("tasks.kinds=files,csv", "tasks.kinds", ("files", "csv")),
        ("tasks.kinds=files", "tasks.kinds", ("files",)),
        ("tasks.difficulties=easy,hard", "tasks.difficulties", ("easy", "hard")),
        ("learner.betas=0.9,0.95", "learner.betas", (0.9, 0.95)),
        ("evaluation=none", "evaluation", None),
        ("algorithm.importance_cap=none", "algorithm.importance_cap", None),
        ("warm_start.steps=3", "warm_start.steps", 3),
        ("data_seed=5", "data_seed", 5),
    ],
)
def test_an_override_sets_its_key(override: str, key: str, value: object) -> None:
    assert flatten(parse_config({}, [override]))[key] == value


def test_later_overrides_win_and_the_callers_data_stays() -> None:
    data: dict[str, Any] = {"rollout": {"group_size": 4}}
    config = parse_config(data, ["rollout.group_size=5", "rollout.group_size=6"])
    assert config.rollout.group_size == 6
    assert data == {"rollout": {"group_size": 4}}


@pytest.mark.parametrize("override", ["steps", "=3", ""])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    assert "expected an override `section.key=value`" in refusal({}, override)


def test_an_override_below_a_value_is_refused() -> None:
    assert "expected `evaluation` to be a section" in refusal({"evaluation": "none"}, "evaluation.every=2")
    assert "unknown key `steps`" not in refusal({"steps": 3}, "steps.more=1")


def test_the_model_can_be_given_without_losing_its_section() -> None:
    config = parse_config({"model": {"path": "a", "dtype": "bfloat16", "train": "full"}}, ["model=b"])
    assert config.model == ModelConfig(path="b", dtype="bfloat16", train="full")


def test_an_error_names_the_file_and_its_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 3\n")
    with pytest.raises(ConfigError, match=rf"in {file} with stpes=4"):
        load_config(file, ["stpes=4"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"steps = \n", "syntax error"),
        (b"\xff\xfe", "readable config file"),
        pytest.param(b"steps = " + b"9" * 5000, "syntax error", id="5000 digits"),
        pytest.param(b"steps = " + b"[" * 20_000, "syntax error", id="deep"),
    ],
)
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        load_config(file)
    with pytest.raises(ConfigError, match="readable config file"):
        load_config(tmp_path / "absent.toml")


texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
positive = st.floats(min_value=1e-30, max_value=1e30)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.toml")), ids=lambda file: file.stem)
def test_every_example_reads_back_equal_from_its_run_folder(file: Path) -> None:
    config = load_config(file, [])
    assert parse_config(tomllib.loads(to_toml(config))) == config


@given(
    run=texts,
    kinds=st.lists(texts, max_size=3),
    rate=positive,
    cap=st.none() | positive,
    rank=st.integers(1, 99),
    weights=st.dictionaries(texts, positive, max_size=3),
)
def test_a_resolved_config_reads_back_equal(
    run: str, kinds: list[str], rate: float, cap: float | None, rank: int, weights: dict[str, float]
) -> None:
    config = Config().model_copy(
        update={
            "run": run,
            "evaluation": None,
            "tasks": TasksConfig(kinds=tuple(kinds), weights=weights),
            "model": ModelConfig(lora=LoraConfig(rank=rank, targets=("a", "b"))),
            "learner": Config().learner.model_copy(update={"learning_rate": rate, "betas": (0.5, 1 / 3)}),
            "algorithm": Config().algorithm.model_copy(update={"importance_cap": cap}),
        }
    )
    assert parse_config(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.toml")), ids=lambda path: path.name)
def test_the_examples_configs_are_valid(path: Path) -> None:
    if path.name != "task.toml":
        assert load_config(path).steps > 0


@pytest.mark.parametrize("override", ["seed=-1", "seed=9223372036854775808", f"seed={'9' * 5000}"], ids=len)
def test_a_seed_that_torch_can_not_take_is_refused(override: str) -> None:
    assert "`seed`" in refusal({}, override)
