"""A run as people watch it: a live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thundersyncrl.observe.lines import evaluation_line, percent, phase_seconds, step_line, transcript_lines
from thundersyncrl.observe.observer import EvaluationResult, Observer
from thundersyncrl.records import StepReport, Trajectory

_RECENT_STEPS = 8
_PLAIN_PROGRESS_S = 10.0
"""Plain lines about progress are at least this far apart, or a log would hold nothing else."""


def make_display(stream: TextIO, *, num_steps: int, show_sample_every: int) -> Observer:
    """Return a live display when the stream is a terminal, else plain lines.

    Args:
        num_steps: of the whole run, for the progress bar.
        show_sample_every: steps between printed transcripts; 0: never.
    """
    samples = SampleChoice(every=show_sample_every)
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, num_steps=num_steps, samples=samples)
    return PlainDisplay(stream, samples=samples)


class SampleChoice:
    """Picks the trajectory of a step that people are shown: the best reward, then the most turns.

    Example:
        >>> SampleChoice(every=5).take(10)
        []
    """

    def __init__(self, *, every: int) -> None:
        self._every = every
        self._best: dict[int, tuple[float, int, Trajectory, float | None]] = {}

    def offer(self, trajectory: Trajectory, reward: float | None) -> None:
        """Consider a finished trajectory."""
        if not trajectory.messages:
            return
        rank = (float("-inf") if reward is None else reward, len(trajectory.turns))
        best = self._best.get(trajectory.id.step)
        if best is None or rank > best[:2]:
            self._best[trajectory.id.step] = (*rank, trajectory, reward)

    def take(self, step: int) -> list[str]:
        """Return the lines of the step's choice, and forget it; empty when this step shows none."""
        best = self._best.pop(step, None)
        if best is None or not self._every or step % self._every:
            return []
        return transcript_lines(best[2], best[3])


class PlainDisplay:
    """Plain lines with the elapsed seconds, flushed at once."""

    def __init__(self, stream: TextIO, *, samples: SampleChoice) -> None:
        self._stream = stream
        self._samples = samples
        self._started_s = time.monotonic()
        self._progress_s = self._started_s

    def phase(self, name: str, detail: str = "") -> None:
        self._progress_s = time.monotonic()
        self._print(f"{name}: {detail}" if detail else name)

    def progress(self, what: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done < total and now_s - self._progress_s >= _PLAIN_PROGRESS_S:
            self._progress_s = now_s
            self._print(f"  {what} {done} of {total}")

    def step(self, report: StepReport) -> None:
        self._progress_s = time.monotonic()
        self._print(step_line(report))
        for line in self._samples.take(report.step):
            print(f"  | {line}", file=self._stream, flush=True)

    def sample(self, trajectory: Trajectory, reward: float | None) -> None:
        self._samples.offer(trajectory, reward)

    def evaluation(self, name: str, result: EvaluationResult) -> None:
        self._print(evaluation_line(name, result))

    def close(self) -> None:
        self._stream.flush()

    def _print(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started_s:6.0f} s] {text}", file=self._stream, flush=True)


class LiveDisplay:
    """The phase, its progress, the last steps and the held-out results, redrawn in place."""

    def __init__(self, console: Console, *, num_steps: int, samples: SampleChoice) -> None:
        self._console = console
        self._num_steps = num_steps
        self._samples = samples
        self._started_s = time.monotonic()
        self._phase = "starting"
        self._progress: tuple[str, int, int] | None = None
        self._steps: deque[StepReport] = deque(maxlen=_RECENT_STEPS)
        self._evaluations: list[str] = []
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=2)
        self._live.start()

    def phase(self, name: str, detail: str = "") -> None:
        self._phase = f"{name}: {detail}" if detail else name
        self._progress = None

    def progress(self, what: str, done: int, total: int) -> None:
        self._progress = (what, done, total)

    def step(self, report: StepReport) -> None:
        self._steps.append(report)
        self._progress = None
        lines = self._samples.take(report.step)
        if lines:
            # Text, not a string: what a model wrote must not be read as markup.
            self._console.print(Text("\n".join(lines), style="dim"))

    def sample(self, trajectory: Trajectory, reward: float | None) -> None:
        self._samples.offer(trajectory, reward)

    def evaluation(self, name: str, result: EvaluationResult) -> None:
        self._evaluations.append(evaluation_line(name, result))

    def close(self) -> None:
        """Leave the last picture and give the cursor back."""
        self._live.stop()

    def _render(self) -> RenderableType:
        elapsed_s = time.monotonic() - self._started_s
        parts: list[RenderableType] = [Text(f"{self._phase}   {elapsed_s:.0f} s", style="bold")]
        if self._steps:
            done = self._steps[-1].step + 1
            parts.append(_bar(f"steps {done} of {self._num_steps}", done, self._num_steps))
        if self._progress is not None:
            what, done, total = self._progress
            parts.append(_bar(f"{what} {done} of {total}", done, total))
        if self._steps:
            parts.append(_step_table(list(self._steps)))
        parts += [Text(line, style="green") for line in self._evaluations]
        return Group(*parts)


def _bar(label: str, done: int, total: int) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(Text(label), ProgressBar(total=max(total, 1), completed=min(done, total), width=30))
    return row


def _step_table(reports: list[StepReport]) -> Table:
    phases = list(dict.fromkeys(name for report in reports for name in phase_seconds(report)))
    table = Table(box=None, padding=(0, 1))
    is_measured = any("idle_engine_s" in report.metrics for report in reports)
    idle = ("idle engine s", "idle learner s", "overlap", "above bound") if is_measured else ()
    for title in ("step", "reward", "pass", "tokens/s", *(f"{name} s" for name in phases), *idle, "failed"):
        table.add_column(title, justify="right")
    for report in reports:
        metrics, seconds = report.metrics, phase_seconds(report)
        table.add_row(
            str(report.step),
            f"{metrics['reward_mean']:.3f}" if "reward_mean" in metrics else "",
            percent(metrics["pass_rate"]) if "pass_rate" in metrics else "",
            f"{metrics['tokens_per_s']:,.0f}" if "tokens_per_s" in metrics else "",
            *(f"{seconds[name]:.1f}" if name in seconds else "" for name in phases),
            *(_idle_cells(report) if is_measured else ()),
            str(report.num_failed),
        )
    return table


def _idle_cells(report: StepReport) -> list[str]:
    metrics = report.metrics
    seconds = [f"{metrics[name]:.1f}" if name in metrics else "" for name in ("idle_engine_s", "idle_learner_s")]
    shares = [f"{100 * metrics[name]:.0f} %" if name in metrics else "" for name in ("overlap", "above_bound")]
    return [*seconds, *shares]
