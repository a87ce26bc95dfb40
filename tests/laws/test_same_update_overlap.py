"""Law: whatever the timing, the streaming level and the placement, the same trajectories give the same parameters."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import Recorder
from tests.test_runs import last_weights, model_folder, tiny_config
from thundersyncrl.config import Config
from thundersyncrl.environments.environment import Observation
from thundersyncrl.records import Reward, Task
from thundersyncrl.runs import train_run
from thundersyncrl.runtime.run_folder import open_run

__all__ = ["model_folder"]

STEPS = 10
LATENCY = random.Random()
"""Seeded anew for each run, by its name: no two runs have the same timing."""


class SlowWorld:
    """Tools and verifier take a random time; turns, observations and reward depend on the actions' text alone."""

    system_prompt = "write"

    def __init__(self, task: Task):
        self._text = task.id

    def _drawn(self, what: str) -> float:
        return hashlib.blake2b(f"{what}{self._text}".encode(), digest_size=1).digest()[0] / 255

    async def open(self) -> None:
        await self._wait()

    async def _wait(self) -> None:
        await asyncio.sleep(0.02 * LATENCY.random() ** 4)

    async def act(self, action_text: str) -> Observation:
        self._text += action_text
        await self._wait()
        return Observation(text="x" * round(20 * self._drawn("length")), done=self._drawn("done") < 0.4)

    async def grade(self) -> Reward:
        await self._wait()
        return Reward(value=float(self._drawn("reward") < 0.5))

    async def close(self) -> None:
        pass


@pytest.fixture
def in_slow_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whole runs play in slow worlds: they live in the controller, wherever engine and learner do."""
    tasks = [Task(id=f"t{i}", instruction=f"say {i}" * (i + 1)) for i in range(7)]

    def no_folders(*_: Any) -> list[Task]:
        return tasks

    monkeypatch.setattr("thundersyncrl.build.task_set", no_folders)
    monkeypatch.setattr("thundersyncrl.build.shell_environments", lambda settings: SlowWorld)


def run(config: Config, name: str) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.Tensor]]:
    """Return a run's sampled tokens and its last parameters."""
    LATENCY.seed(name)
    open_run(config, resume=False)
    recorder = Recorder()
    train_run(config, resume=False, sink=recorder)
    assert [report.num_failed for report in recorder.reports] == [0] * STEPS
    assert sum(report.metrics["gradient_norm"] > 0 for report in recorder.reports) > STEPS / 2
    return {str(t.id): t.token_ids for t in recorder.trajectories}, last_weights(Path(config.run))


@pytest.mark.slow
def test_every_arm_gives_the_same_parameters(model_folder: Path, tmp_path: Path, in_slow_worlds: None) -> None:
    found: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, torch.Tensor]]] = {}
    for placement in ("inline", "split"):
        for stream in ("batch", "group", "trajectory"):
            name = f"{placement}-{stream}"
            config = tiny_config(
                model_folder,
                tmp_path / name,
                placement=placement,
                steps=STEPS,
                checkpoint_every=0,
                model={"dtype": "float64", "threads": 2 if placement == "split" else 1},
                learner={"stream": stream, "learning_rate": 1e-3, "pack_tokens": 128},
                rollout={"group_size": 4, "max_turns": 3, "max_action_tokens": 18},
                tasks={"kinds": [], "difficulties": []},
                warm_start="none",
                evaluation="none",
            )
            found[name] = run(config, name)
    tokens, weights = found["inline-batch"]
    assert sum(len(of) for of in tokens.values()) > 1000
    for name, (other_tokens, other_weights) in found.items():
        assert other_tokens == tokens, name
        for key, weight in weights.items():
            torch.testing.assert_close(other_weights[key], weight, rtol=0, atol=1e-8, msg=f"{name}: {key}")
