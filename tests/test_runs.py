"""Whole runs on a tiny saved model, with real tasks in the real sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import Recorder
from tests.toys import tiny_model, toy_tokenizer
from thundersyncrl.config import Config, parse_config
from thundersyncrl.errors import ConfigError
from thundersyncrl.runs import eval_run, rollout_run, sft_run, train_run
from thundersyncrl.runtime.checkpoint import list_checkpoints
from thundersyncrl.runtime.run_folder import open_run

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = toy_tokenizer()
    tiny_model("qwen3", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_config(model_folder: Path, run: Path, **changes: Any) -> Config:
    data: dict[str, Any] = {
        "steps": 2,
        "run": str(run),
        "checkpoint_every": 1,
        "model": {"path": str(model_folder), "train": "full", "threads": 1},
        "rollout": {
            "groups_per_step": 2,
            "group_size": 2,
            "max_turns": 2,
            "max_turn_tokens": 6,
            "max_action_tokens": 12,
            "context_tokens": 1024,
        },
        "tasks": {"kinds": ["make", "notes"], "difficulties": ["easy"], "num_train": 8, "num_heldout": 4},
        "warm_start": {"steps": 1, "batch_size": 2, "learning_rate": 1e-3},
        "evaluation": {"num_tasks": 2},
    }
    for key, value in changes.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) and key in data else value
    return parse_config(data)


def run_whole(config: Config, *, resume: bool = False) -> tuple[dict[str, Any], Recorder]:
    open_run(config, resume=resume)
    recorder = Recorder()
    return train_run(config, resume=resume, sink=recorder), recorder


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(list_checkpoints(run / "checkpoints")[-1] / "trained.safetensors")


def test_a_run_evaluates_warm_starts_trains_and_leaves_checkpoints(model_folder: Path, tmp_path: Path):
    summary, recorder = run_whole(tiny_config(model_folder, tmp_path / "run"))
    assert summary["pass_rate_before"] is not None
    assert summary["pass_rate_warm"] is not None
    assert summary["pass_rate_after"] is not None
    assert [r.step for r in recorder.reports] == [0, 1]
    assert all(r.num_launched == 4 for r in recorder.reports)
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert json.loads((newest / "progress.json").read_text())["next_step"] == 2


def test_a_resumed_run_continues_and_ends_where_the_whole_one_does(model_folder: Path, tmp_path: Path):
    """Case H-22, through the commands' own path."""
    whole, whole_record = run_whole(tiny_config(model_folder, tmp_path / "whole"))
    run_whole(tiny_config(model_folder, tmp_path / "parts", steps=1))
    _, rest = run_whole(tiny_config(model_folder, tmp_path / "parts"), resume=True)
    assert [r.step for r in rest.reports] == [1]
    expected = {str(t.id): t.token_ids for t in whole_record.trajectories if t.id.step == 1}
    assert {str(t.id): t.token_ids for t in rest.trajectories} == expected
    left, right = last_weights(tmp_path / "whole"), last_weights(tmp_path / "parts")
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert whole["steps"] == 2


def test_a_checkpoint_of_another_model_is_refused(model_folder: Path, tmp_path: Path):
    run_whole(tiny_config(model_folder, tmp_path / "run", steps=0))
    other = tmp_path / "other"
    tokenizer = toy_tokenizer()
    tiny_model("qwen3", vocab_size=len(tokenizer), layers=1).save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match="checkpoint of this model"):
        eval_run(tiny_config(other, tmp_path / "x"), checkpoint=tmp_path / "run", observer=Recorder())


def test_a_checkpoint_that_was_cut_in_half_is_not_taken_for_a_whole_one(model_folder: Path, tmp_path: Path):
    run_whole(tiny_config(model_folder, tmp_path / "run", steps=1))
    half = tmp_path / "run" / "checkpoints" / "step-000009"
    half.mkdir()
    (half / "trained.safetensors").write_bytes(b"half")
    _, rest = run_whole(tiny_config(model_folder, tmp_path / "run"), resume=True)
    assert [r.step for r in rest.reports] == [1]


def test_sft_changes_the_weights_and_eval_reads_them(model_folder: Path, tmp_path: Path):
    config = tiny_config(model_folder, tmp_path / "sft")
    open_run(config, resume=False)
    sft_run(config, Recorder())
    before = load_file(model_folder / "model.safetensors")
    after = last_weights(tmp_path / "sft")
    assert any(not torch.equal(before[name], after[name]) for name in before if name in after)
    result = eval_run(config, checkpoint=tmp_path / "sft", observer=Recorder())
    assert result["num"] == 2


def test_rollout_writes_token_exact_rows(model_folder: Path, tmp_path: Path):
    config = tiny_config(model_folder, tmp_path / "r")
    summary = rollout_run(config, num=2, output=tmp_path / "rows.jsonl", observer=Recorder())
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert summary["trajectories"] == len(rows) == 4
    assert all(sum(row["action_mask"]) == len(row["behavior_logprobs"]) > 0 for row in rows)
    assert all(len(row["action_mask"]) == len(row["token_ids"]) for row in rows)


def test_kl_to_the_reference_and_a_lora_run_end_to_end(model_folder: Path, tmp_path: Path):
    config = tiny_config(
        model_folder,
        tmp_path / "kl",
        model={"train": "lora"},
        algorithm={"kl_coefficient": 0.1},
        steps=2,
    )
    _, recorder = run_whole(config)
    assert recorder.reports[-1].metrics["gradient_norm"] > 0.0, "the KL term alone must move the policy"


def test_an_error_in_the_learner_ends_the_run_with_its_reason(model_folder: Path, tmp_path: Path, monkeypatch: Any):
    from thundersyncrl.errors import NumericsError
    from thundersyncrl.learner.learner import Learner

    def broken(self: Learner, **_: Any) -> None:
        raise NumericsError("the learner broke")

    config = tiny_config(model_folder, tmp_path / "broken", warm_start="none")
    open_run(config, resume=False)
    monkeypatch.setattr(Learner, "run_once", broken)

    async def limited() -> None:
        await asyncio.wait_for(asyncio.to_thread(train_run, config, resume=False, sink=Recorder()), timeout=60)

    with pytest.raises(NumericsError, match="the learner broke"):
        asyncio.run(limited())
