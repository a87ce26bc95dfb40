"""Trackers get a run's metrics through their own libraries: the real ones where installed, fakes of their calls too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.observe.records import make_report, make_trajectory
from thundersyncrl.config import Config, parse_config
from thundersyncrl.errors import ConfigError
from thundersyncrl.observe.observer import EvaluationResult, Observer
from thundersyncrl.observe.trackers import _LIBRARIES, make_trackers  # pyright: ignore[reportPrivateUsage]
from thundersyncrl.runtime.run_folder import RunFolder


def needs(module: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")


def config_of(path: Path, *names: str) -> Config:
    return parse_config({"run": str(path), "trackers": list(names)})


def watch(observer: Observer, first: int = 0) -> None:
    observer.phase("training")
    observer.progress("trajectories", 1, 8)
    observer.sample(make_trajectory(), 1.0)
    for step in (first, first + 1):
        metrics = {"reward_mean": 0.25 * step, "overlap": 0.75}
        observer.step(make_report(step=step, failures={"tool": 1}, metrics=metrics))
    observer.evaluation("after", EvaluationResult(num=4, pass_rate=0.5, by_kind={"git": 0.5}))
    observer.close()
    observer.close()


@pytest.mark.parametrize("name", _LIBRARIES)
def test_a_library_that_is_missing_is_refused_with_the_extras_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, _LIBRARIES[name][0], None)
    with pytest.raises(ConfigError, match=rf"thundersyncrl\[{name}\]"):
        make_trackers(config_of(tmp_path, name), RunFolder(tmp_path))
    assert list(tmp_path.iterdir()) == [], "refused before anything is written"


def test_every_tracker_of_the_config_has_a_library_and_an_extra() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name in ("tensorboard", "wandb", "trackio", "mlflow"):
        assert parse_config({"trackers": [name]}).trackers == (name,)
        assert name in _LIBRARIES
        assert f"\n{name} = [" in project


def test_without_trackers_nothing_is_made(tmp_path: Path) -> None:
    watch(make_trackers(config_of(tmp_path), RunFolder(tmp_path)))
    assert list(tmp_path.iterdir()) == []


@needs("tensorboard")
def test_tensorboard_holds_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path)
    watch(make_trackers(config_of(tmp_path, "tensorboard"), folder))
    watch(make_trackers(config_of(tmp_path, "tensorboard"), folder), first=2)  # resumed
    found = EventAccumulator(str(folder.trackers / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/reward_mean")] == [(i, 0.25 * i) for i in range(4)]
    assert [(e.step, e.value) for e in found.Scalars("heldout/pass_rate")] == [(2, 0.5), (4, 0.5)]
    assert found.Scalars("train/num_failed_tool")[0].value == 1.0


@needs("mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
def test_mlflow_holds_what_was_logged_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sqlalchemy")
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = RunFolder(tmp_path)
    for first in (0, 2):
        watch(make_trackers(config_of(tmp_path, "mlflow"), folder), first=first)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.trackers / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("thundersyncrl")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/reward_mean")
    assert sorted((m.step, m.value) for m in history) == [(i, 0.25 * i) for i in range(4)]
    assert run.data.params["rollout.group_size"] == "8"
    assert run.info.status == "FINISHED"


@needs("wandb")
def test_wandb_takes_what_was_logged_off_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = RunFolder(tmp_path)
    watch(make_trackers(config_of(tmp_path, "wandb"), folder))
    (written,) = (folder.trackers / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/reward_mean" in written.read_bytes()


class FakeLibrary(ModuleType):
    """Stands for wandb and for trackio: keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("fake")
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int | None]] = []
        self.num_finished = 0

    def init(self, **arguments: Any) -> Any:
        self.started.append(arguments)
        return SimpleNamespace(log=self.log, finish=self.finish, define_metric=lambda *_, **__: None)

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((metrics, step))

    def finish(self) -> None:
        self.num_finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_has_one_identity_in_its_tracker_and_hands_over_config_and_metrics(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeLibrary()
    monkeypatch.setitem(sys.modules, name, library)
    for first in (0, 2):
        watch(make_trackers(config_of(tmp_path, name), RunFolder(tmp_path)), first=first)
    key = "id" if name == "wandb" else "name"
    one, other = library.started
    assert one[key] == other[key], "a resumed run goes on under the same identity"
    assert one["resume"] == "allow"
    assert one["config"]["rollout.group_size"] == "8"
    steps = [metrics.get("step", step) for metrics, step in library.logged if "train/overlap" in metrics]
    assert steps == [0, 1, 2, 3]
    assert library.num_finished >= 2
