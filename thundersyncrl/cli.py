"""The commands. What one needs is imported when it runs, so that `--help` and refusals are immediate."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from thundersyncrl.bench_command import bench_app
from thundersyncrl.command_options import EXIT_CONFIG, AsJson, ConfigFile, Overrides, print_json
from thundersyncrl.config import Config, load_config, parse_config
from thundersyncrl.errors import ConfigError, ThunderSyncError
from thundersyncrl.report_command import report
from thundersyncrl.tasks_command import tasks_app

if TYPE_CHECKING:
    from thundersyncrl.observe.observer import Observer
    from thundersyncrl.runtime.run_folder import RunFolder

_EXIT_ERROR, _EXIT_INTERRUPT, _EXIT_TERMINATE = 1, 130, 143

app = typer.Typer(
    name="thundersyncrl",
    help="Reinforcement learning for language-model agents: streamed, and never stale.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(tasks_app, name="tasks")
app.add_typer(bench_app, name="bench")

StartedAt = Annotated[
    float,
    typer.Option(
        envvar="THUNDERSYNCRL_STARTED_AT",
        hidden=True,
        help="When the clock of `seconds` began, in seconds since 1970; 0: when the run does.",
    ),
]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the run folder.")] = False,
    as_json: AsJson = False,
    started_at: StartedAt = 0.0,
) -> None:
    """Warm-start, train and evaluate; the last line printed is the result as JSON.

    \b
    Example:
        thundersyncrl train examples/shell/quickstart.toml steps=10 run=runs/first
    """
    settings = load_config(config, overrides or [])
    from thundersyncrl.runtime.run_folder import open_run

    folder = open_run(settings, resume=resume)
    with _watched(settings, to_stderr=as_json, folder=folder) as observer:
        from thundersyncrl.runs import train_run

        summary = dict(train_run(settings, resume=resume, sink=observer))
    if started_at:
        summary["seconds"] = round(time.time() - started_at, 1)
    folder.write_summary(summary)
    _draw_curves(folder)
    print_json(summary)


@app.command()
def sft(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Run only the supervised warm start, and keep a checkpoint of it in the run folder.

    \b
    Example:
        thundersyncrl sft examples/shell/quickstart.toml warm_start.steps=20 run=runs/sft
    """
    settings = load_config(config, overrides or [])
    if settings.warm_start is None:
        raise ConfigError(f"expected a [warm_start] section, got none (in {config}); add one with `steps`")
    from thundersyncrl.runtime.run_folder import open_run

    folder = open_run(settings, resume=False)
    with _watched(settings, to_stderr=as_json, folder=folder) as observer:
        from thundersyncrl.runs import sft_run

        summary = dict(sft_run(settings, observer))
    folder.write_summary(summary)
    print_json(summary)


@app.command("eval")
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Run folder whose newest checkpoint is evaluated; without it, the model as it comes."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the pass rate on held-out tasks.

    \b
    Example:
        thundersyncrl eval examples/shell/quickstart.toml --checkpoint runs/first --json
    """
    settings = load_config(config, overrides or [])
    if settings.evaluation is None:
        raise ConfigError(f'expected an [evaluation] section, got "none" (in {config}); remove that line')
    with _watched(settings, to_stderr=as_json) as observer:
        from thundersyncrl.runs import eval_run

        summary = dict(eval_run(settings, checkpoint=checkpoint, observer=observer))
    print_json(summary)


@app.command()
def rollout(
    config: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(help="JSONL file to write, one trajectory a line.")] = Path(
        "trajectories.jsonl"
    ),
    num: Annotated[int, typer.Option(min=1, help="Tasks to sample, one group each.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Sample trajectories of training tasks into a file, with tokens and log-probs, without a learner.

    \b
    Example:
        thundersyncrl rollout examples/shell/quickstart.toml --num 4 --output trajectories.jsonl
    """
    settings = load_config(config, overrides or [])
    from thundersyncrl.runtime.run_folder import check_new_file

    check_new_file(output)
    with _watched(settings, to_stderr=as_json) as observer:
        from thundersyncrl.runs import rollout_run

        summary = dict(rollout_run(settings, num=num, output=output, observer=observer))
    print_json(summary)


@app.command()
def certify(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file of the run.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny random models instead of the config's.")] = False,
    sabotage: Annotated[
        str, typer.Option(metavar="NAME", help="Break one thing on purpose, to see that it is noticed.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Measure whether the streamed update is the batch's update; exit code 0 only when it is.

    \b
    Example:
        thundersyncrl certify --tiny --json
    """
    settings = _certified_config(config, overrides or [], tiny=tiny)
    from thundersyncrl.certify import certify as run_certificate

    def show(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    report = run_certificate(settings, tiny=tiny, sabotage=sabotage, progress=show)
    result: Mapping[str, Any] = report.to_json()
    print(json.dumps(result) if as_json else report.table(), flush=True)
    if result["verdict"] != "pass":
        raise typer.Exit(_EXIT_ERROR)


@app.command()
def check(config: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check config, estimator, tasks, sandbox and chat template, without loading a model or training.

    \b
    Example:
        thundersyncrl check examples/shell/quickstart.toml
    """
    settings = load_config(config, overrides or [])
    from thundersyncrl.check import check_run

    findings = check_run(settings)
    if as_json:
        print_json({"ok": all(f.ok for f in findings), "checks": [f.to_json() for f in findings]})
    else:
        for finding in findings:
            print(finding.line(), flush=True)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(EXIT_CONFIG)


app.command()(report)


def _certified_config(config: Path | None, overrides: list[str], *, tiny: bool) -> Config | None:
    """Return the config to certify; None for `--tiny` alone. An override may stand where no file does."""
    if config is not None and "=" in str(config) and not config.exists():
        config, overrides = None, [str(config), *overrides]
    if config is not None:
        return load_config(config, overrides)
    if not tiny:
        raise ConfigError("expected a config file or --tiny, got neither; try `thundersyncrl certify --tiny`")
    return parse_config({}, overrides) if overrides else None


@contextmanager
def _watched(config: Config, *, to_stderr: bool, folder: RunFolder | None = None) -> Generator[Observer, None, None]:
    """Give an observer for one command, and close it however the command ends.

    Args:
        to_stderr: keep stdout free for the one JSON object.
        folder: also record metrics and transcripts there.
    """
    from thundersyncrl.observe.display import make_display
    from thundersyncrl.observe.metrics import MetricsFile
    from thundersyncrl.observe.tee import Tee
    from thundersyncrl.observe.trackers import make_trackers
    from thundersyncrl.observe.transcripts import TranscriptsFile

    files: list[Observer] = []
    if folder is not None:
        files = [MetricsFile(folder.metrics), TranscriptsFile(folder.transcripts), make_trackers(config, folder)]
    display = make_display(
        sys.stderr if to_stderr else sys.stdout,
        num_steps=config.steps,
        show_sample_every=config.show_sample_every,
    )
    # Files first: what was recorded must not depend on the terminal.
    observer = Tee(*files, display)
    try:
        yield observer
    finally:
        observer.close()


def _draw_curves(folder: RunFolder) -> None:
    from thundersyncrl.observe.plot import plot_curves

    try:
        plot_curves(folder.metrics, folder.curves)
    except ConfigError as error:
        print(f"no {folder.curves.name}: {error}", file=sys.stderr, flush=True)


class _Termination:
    """Turns SIGTERM into the interrupt that SIGINT gives, so that both end a run by the same clean-up."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)  # an event loop cancels its tasks first
        else:
            raise KeyboardInterrupt  # SIGINT is ignored, as in a shell's background job


_STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO})


def _known_errors(error: Exception) -> list[ThunderSyncError]:
    """Return the errors that tasks running side by side raised on purpose; none when any of them is a bug."""
    if isinstance(error, ThunderSyncError):
        return [error]
    if isinstance(error, OSError) and error.errno in _STORAGE:
        text = f"expected storage that can be written, got {error}; make room, then go on with --resume"
        return [ThunderSyncError(text)]
    if not isinstance(error, ExceptionGroup):
        return []
    parts = [_known_errors(part) for part in cast(ExceptionGroup[Exception], error).exceptions]
    return [known for part in parts for known in part] if all(parts) else []


def main() -> None:
    """Run the command line and exit: 0 success, 1 failure, 2 bad config or usage, 130 SIGINT, 143 SIGTERM."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a model may write what the terminal can't show
    # The display shows progress; bars of libraries would be drawn over it.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # OpenMP threads that spin while they wait slow each other down fourfold where sandboxes share their cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Spinning for some hundred microseconds first bridges the gaps inside a forward: 1.4 times as fast on two cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")
    termination = _Termination()
    try:
        app()
    except (ThunderSyncError, ExceptionGroup, OSError) as error:
        known = _known_errors(error)
        if not known:
            raise
        for text in dict.fromkeys(map(str, known)):
            print(f"error: {text}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CONFIG if isinstance(known[0], ConfigError) else _EXIT_ERROR) from None
    except SystemExit as exit_:
        if termination.came:
            print("terminated", file=sys.stderr, flush=True)
            raise SystemExit(_EXIT_TERMINATE) from None
        if exit_.code == _EXIT_INTERRUPT:
            print("interrupted", file=sys.stderr, flush=True)
        raise


if __name__ == "__main__":
    main()
