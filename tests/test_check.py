"""What is checked before a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.toys import toy_tokenizer
from thundersyncrl.check import Finding, check_run
from thundersyncrl.config import parse_config
from thundersyncrl.environments.shell_tasks import make_tasks

pytestmark = pytest.mark.sandbox


@pytest.fixture
def model(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder with a tokenizer and no weights."""
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def findings(model: Path, *overrides: str) -> dict[str, Finding]:
    small = ("tasks.num_train=4", "tasks.num_heldout=3", f"model={model}", *overrides)
    return {finding.name: finding for finding in check_run(parse_config({}, small))}


def test_everything_is_found_without_weights(model: Path) -> None:
    found = findings(model)
    assert list(found) == ["algorithm", "sandbox", "tasks", "chat template"]
    assert {name: finding.detail for name, finding in found.items() if not finding.ok} == {}
    assert "train: 4 tasks" in found["tasks"].detail
    assert "held-out: 3 tasks" in found["tasks"].detail


@pytest.mark.parametrize(
    ("name", "override", "said"),
    [
        ("algorithm", "algorithm.estimator=grop", "did you mean 'grpo'"),
        ("algorithm", "algorithm.extra_groups=2", "`algorithm.extra_groups` has no effect"),
        ("tasks", "tasks.kinds=cpoy", "did you mean 'copy'"),
        ("tasks", "tasks.train=absent", "absent"),
        ("chat template", "model=/nowhere/at/all", "'/nowhere/at/all'"),
    ],
)
def test_what_is_wrong_is_found_and_the_rest_is_checked_all_the_same(
    model: Path, name: str, override: str, said: str
) -> None:
    extra = ("tasks.num_train=240",) if override.startswith("tasks.train") else ()
    found = findings(model, override, *extra)
    assert [finding.name for finding in found.values() if not finding.ok] == [name]
    assert said in found[name].detail


def test_a_tokenizer_without_chat_template_is_found(tmp_path: Path) -> None:
    toy_tokenizer(chat_template=False).save_pretrained(tmp_path / "model")
    found = findings(tmp_path / "model")
    assert "chat template, got none" in found["chat template"].detail


def test_held_out_tasks_that_are_trained_on_are_found(model: Path, tmp_path: Path) -> None:
    own = make_tasks(tmp_path / "own", num=4, seed=5, split="train")
    copied = tmp_path / "heldout" / "under-another-name"
    copied.parent.mkdir()
    own[0].rename(copied)
    (tmp_path / "own" / own[0].name).symlink_to(copied)
    overrides = ("tasks.num_train=240", "tasks.num_heldout=64")
    found = findings(model, *overrides, f"tasks.train={tmp_path / 'own'}", f"tasks.heldout={copied.parent}")
    assert "got 1 that are in both folders, such as 'under-another-name'" in found["tasks"].detail
