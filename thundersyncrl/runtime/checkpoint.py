"""Checkpoints: trained weights, optimizer, data position and version, written whole or not at all.

Sampling needs no saved random state: every request's seed is derived from the run's seed and the trajectory's id.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

from thundersyncrl.algorithms.own_reward import RunningMean
from thundersyncrl.errors import ConfigError
from thundersyncrl.learner.learner import Learner
from thundersyncrl.learner.policy import Policy

KEPT = 2
"""Checkpoints that stay in a run folder: the newest, and one more in case its disk is found to be bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands."""

    next_step: int
    version: int
    task_position: int
    num_rewards: int
    reward_mean: float
    """Over all past steps: the running-mean baseline."""
    pass_rates: dict[str, float]
    """Held-out results so far, by name."""
    seconds: float
    """Run time so far, over all its parts."""


def save_checkpoint(folder: Path, learner: Learner, progress: Progress) -> Path:
    """Write a checkpoint aside, rename it into place, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{progress.next_step:06d}"
    aside = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
    try:
        save_weights(learner.policy, aside)
        state = {"optimizer": learner.optimizer.state_dict(), "torch_rng": torch.get_rng_state()}
        torch.save(state, aside / "optimizer.pt")
        (aside / "progress.json").write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")
        _sync(aside)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for old in list_checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def save_weights(policy: Policy, folder: Path) -> None:
    """Write the trained weights: PEFT's adapter files, or the whole model as a Hugging Face folder."""
    if hasattr(policy.model, "peft_config"):
        cast(Any, policy.model).save_pretrained(folder / "adapter")
    else:
        cast(Any, policy.model).save_pretrained(folder / "model")
    # by our own names and in the trained dtype, so that a resumed run is bit-equal
    save_file({n: p.detach().cpu().contiguous() for n, p in policy.trained.items()}, folder / "trained.safetensors")


def load_weights(policy: Policy, checkpoint: Path) -> None:
    """Load trained weights in place.

    Raises:
        ConfigError: the checkpoint is of another model or adapter, or damaged.
    """
    with _read_whole(checkpoint):
        saved = load_file(checkpoint / "trained.safetensors")
    trained = policy.trained
    if saved.keys() != trained.keys() or any(saved[n].shape != p.shape for n, p in trained.items()):
        odd = sorted(saved.keys() ^ trained.keys())[:3] or "shapes"
        raise ConfigError(
            f"expected a checkpoint of this model and adapter, got another ({checkpoint}): {odd} differ; "
            "use the `[model]` section that the checkpoint was trained with"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(saved[name])


def load_checkpoint(checkpoint: Path, learner: Learner) -> Progress:
    """Load weights, optimizer and learner state in place and return where the run stood.

    Raises:
        ConfigError: as `load_weights`.
    """
    load_weights(learner.policy, checkpoint)
    with _read_whole(checkpoint):
        state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        learner.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        progress = Progress(**json.loads((checkpoint / "progress.json").read_text(encoding="utf-8")))
    learner.version = progress.version
    learner.running_mean = RunningMean(num_rewards=progress.num_rewards, mean=progress.reward_mean)
    return progress


@contextmanager
def _read_whole(checkpoint: Path) -> Generator[None]:
    """Name the checkpoint in whatever error a missing, cut or foreign file of it gives."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(
            f"expected a whole checkpoint, got a damaged one ({checkpoint}): {reason}; "
            "move its folder away to go on from the checkpoint before"
        ) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Return whole checkpoints, oldest first; those being written don't count."""
    return sorted(p for p in folder.glob("step-*") if (p / "progress.json").exists())


def latest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a run folder.

    Raises:
        ConfigError: there is none.
    """
    found = list_checkpoints(run / "checkpoints")
    if not found:
        raise ConfigError(f"expected a run with a checkpoint, got none ({run}); name another folder, or train first")
    return found[-1]


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
