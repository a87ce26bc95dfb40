"""The curves of a run as one picture, drawn from its metrics file. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thundersyncrl.errors import ConfigError
from thundersyncrl.runtime.json_lines import read_lines

Rows = Sequence[dict[str, Any]]


def plot_curves(metrics: Path, picture: Path) -> None:
    """Draw reward and pass rate, mismatch, lengths and time per phase, by step, into a PNG file.

    Step k is sampled under the weights after k updates, so held-out points and steps share the axis.

    Args:
        metrics: the metrics file of a run, with at least one step or evaluation.
        picture: the file to write.

    Raises:
        ConfigError: matplotlib isn't installed, or there is nothing to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"expected matplotlib for {picture.name}, got none; install it with `pip install 'thundersyncrl[plot]'`"
        ) from error
    rows = read_lines(metrics) if metrics.exists() else []
    steps = [row for row in rows if row["event"] == "step"]
    evaluations = [row for row in rows if row["event"] == "evaluation"]
    if not steps and not evaluations:
        raise ConfigError(f"expected at least one step or evaluation, got none ({metrics}); run a step first")
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)  # no global state and no window system, unlike pyplot
    axes = figure.subplots(2, 2)
    _draw_rewards(axes[0][0], steps, evaluations)
    _draw_series(axes[0][1], steps, ("mismatch_max", "mismatch_mean"), "nats, log scale")
    axes[0][1].set_yscale("symlog", linthresh=1e-8)
    _draw_series(axes[1][0], steps, ("action_tokens_mean", "turns_mean"), "per trajectory")
    _draw_times(axes[1][1], steps)
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    figure.savefig(picture, dpi=110)


def _draw_rewards(axis: Any, steps: Rows, evaluations: Rows) -> None:
    axis.set_title("reward and pass rate")
    axis.axhspan(0.0, 1.0, alpha=0.0)  # pass rates are seen on their whole scale, rewards may pass it
    for key in ("reward_mean", "pass_rate"):
        _draw_line(axis, steps, key)
    if evaluations:
        axis.plot(
            [row["step"] for row in evaluations],
            [row["pass_rate"] for row in evaluations],
            "o",
            label="held-out pass rate",
        )
        for row in evaluations:
            # under the point for the first of the two at step 0, so that "before" and "warm" can both be read
            above = row["name"] != "before"
            axis.annotate(
                row["name"],
                (row["step"], row["pass_rate"]),
                xytext=(4, 4 if above else -10),
                textcoords="offset points",
                fontsize=8,
            )


def _draw_series(axis: Any, steps: Rows, keys: Sequence[str], unit: str) -> None:
    axis.set_title(f"{' and '.join(keys)} ({unit})")
    for key in keys:
        _draw_line(axis, steps, key)


def _draw_times(axis: Any, steps: Rows) -> None:
    axis.set_title("seconds per phase")
    phases = sorted({key for row in steps for key in row if key.startswith("time_") and key.endswith("_s")})
    if phases:
        numbers = [row["step"] for row in steps]
        bottoms = [0.0] * len(steps)
        for key in phases:
            heights = [row.get(key, 0.0) for row in steps]
            axis.bar(numbers, heights, bottom=bottoms, width=0.9, label=key.removeprefix("time_").removesuffix("_s"))
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]


def _draw_line(axis: Any, steps: Rows, key: str) -> None:
    points = [(row["step"], row[key]) for row in steps if key in row]
    if points:
        axis.plot(*zip(*points, strict=True), label=key, marker="." if len(points) < 40 else None)
