"""The metrics of a run in experiment trackers: TensorBoard, wandb, trackio, MLflow, each through its own library.

The trackers get what `metrics.jsonl` gets: a step's metrics under `train/`, held-out pass rates under `heldout/`. What
a tracker keeps on this machine lies in `trackers/` of the run folder. Where it sends the rest (server, project, off
line) is said by its own environment variables, such as `WANDB_MODE` or `MLFLOW_TRACKING_URI`.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from thundersyncrl.config import Config
from thundersyncrl.config_keys import flatten
from thundersyncrl.errors import ConfigError
from thundersyncrl.observe.observer import EvaluationResult
from thundersyncrl.records import StepReport, Trajectory
from thundersyncrl.runtime.run_folder import RunFolder

PROJECT = "thundersyncrl"


class Tracker(Protocol):
    """One tracker's run."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record numbers of a step."""
        ...

    def close(self) -> None:
        """Send what is left, and end the run. Idempotent."""
        ...


class TrackerObserver:
    """Implements `Observer` for trackers.

    Args:
        trackers: each is told everything.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers
        self._next_step = 0

    def phase(self, name: str, detail: str = "") -> None:
        """Trackers hold numbers; nothing is recorded."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Nothing is recorded."""

    def step(self, report: StepReport) -> None:
        self._next_step = report.step + 1
        counts = {
            name: float(getattr(report, name)) for name in ("num_launched", "num_trained", "num_dropped", "num_failed")
        }
        failures = {f"num_failed_{kind}": float(count) for kind, count in report.failures.items()}
        found = {**counts, **failures, **report.metrics}
        self._log({f"train/{name}": float(value) for name, value in found.items()}, report.step)

    def sample(self, trajectory: Trajectory, reward: float | None) -> None:
        """Trajectories are in a file of their own; nothing is recorded."""

    def evaluation(self, name: str, result: EvaluationResult) -> None:
        found = {"heldout/pass_rate": result.pass_rate, "heldout/num_failed": float(result.num_failed)}
        if result.several_turns_pass_rate is not None:
            found["heldout/several_turns_pass_rate"] = result.several_turns_pass_rate
        found |= {f"heldout/pass_rate_{kind}": rate for kind, rate in result.by_kind.items()}
        self._log(found, self._next_step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(metrics, step=step)


def make_trackers(config: Config, folder: RunFolder) -> TrackerObserver:
    """Return an observer for the trackers that the config names.

    Raises:
        ConfigError: the library of one isn't installed; the message names the extra.
    """
    loaded = [_LIBRARIES[name] for name in config.trackers]
    modules = [_load(name, module) for name, (module, _) in zip(config.trackers, loaded, strict=True)]
    if modules:
        folder.trackers.mkdir(parents=True, exist_ok=True)
    name, settings = folder.path.resolve().name, {key: str(value) for key, value in flatten(config).items()}
    made = [make(library, folder.trackers, name, settings) for library, (_, make) in zip(modules, loaded, strict=True)]
    return TrackerObserver(made)


def _load(name: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f'expected the library of `trackers = ["{name}"]`, got none ({error}); install it with '
            f"`pip install 'thundersyncrl[{name}]'`, or remove it from the list"
        ) from error


def _kept_id(file: Path, make: Callable[[], str]) -> str:
    """Return the id that a run has in its tracker: a resumed run goes on under the same one."""
    if not file.exists():
        file.write_text(make() + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


class _TensorBoard:
    def __init__(self, library: Any, home: Path, name: str, settings: Mapping[str, str]) -> None:
        self._writer = library.SummaryWriter(log_dir=str(home / "tensorboard"))
        self._writer.add_text("config", "\n".join(f"    {key} = {value}" for key, value in settings.items()))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, library: Any, home: Path, name: str, settings: Mapping[str, str]) -> None:
        id = _kept_id(home / "wandb-run", lambda: uuid.uuid4().hex[:12])
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = library.init(
            project=project, name=name, id=id, resume="allow", dir=str(home), config=dict(settings)
        )
        # steps come again after a resume, and wandb's own count only grows
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, library: Any, home: Path, name: str, settings: Mapping[str, str]) -> None:
        unique = _kept_id(home / "trackio-run", lambda: f"{name}-{uuid.uuid4().hex[:6]}")
        self._library = library
        self._is_open = True
        library.init(project=PROJECT, name=unique, resume="allow", config=dict(settings))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._library.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._library.finish()


class _Mlflow:
    def __init__(self, library: Any, home: Path, name: str, settings: Mapping[str, str]) -> None:
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(home / 'mlflow.db').resolve()}"
        self._metric = library.entities.Metric
        self._client = library.MlflowClient(tracking_uri=place)
        experiment = self._client.get_experiment_by_name(PROJECT)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        is_new = not (home / "mlflow-run").exists()
        self._id = _kept_id(
            home / "mlflow-run", lambda: self._client.create_run(experiment_id, run_name=name).info.run_id
        )
        if is_new:
            params = [library.entities.Param(key, value) for key, value in settings.items()]
            for start in range(0, len(params), 100):  # its limit for one request
                self._client.log_batch(self._id, params=params[start : start + 100])
        self._is_open = True

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        now_ms = int(1000 * time.time())
        rows = [self._metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._client.set_terminated(self._id)


_LIBRARIES: dict[str, tuple[str, Callable[[Any, Path, str, Mapping[str, str]], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", _TensorBoard),
    "wandb": ("wandb", _Wandb),
    "trackio": ("trackio", _Trackio),
    "mlflow": ("mlflow", _Mlflow),
}
