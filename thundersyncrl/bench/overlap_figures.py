"""From measured steps to figures: medians, spreads, ratios over the batch arm, and a table for people. Pure maths."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from thundersyncrl.bench.overlap_arms import Measured

T = TypeVar("T")

REFERENCE = "batch"
SHOWN = ("step_s", "rollout_s", "learner_s", "tail_s", "tail_share", "bound_s", "above_bound")
"""Columns of the table."""
_NAMES = {
    "rollout_s": "time_rollout_s",
    "learner_s": "learner_busy_s",
    "left_s": "time_learner_tail_s",
    "tail_s": "learner_tail_work_s",
    "optimizer_s": "optimizer_s",
    "publish_s": "time_publish_s",
    "overlap": "overlap",
    "bound_s": "bound_s",
    "above_bound": "above_bound",
    "critical_s": "critical_path_s",
}
"""Figure: metric that it is the median of."""


def figures(steps: Sequence[Measured]) -> dict[str, Any]:
    """Return placement -> rho -> arm -> figures, each a median over the arm's steps.

    `ratio` is the batch arm's median step over this arm's; `paired_ratio` the median of the ratios of same steps;
    `tail_share` the work after the last text over the batch arm's learner work.
    """
    found: dict[str, Any] = {}
    for placement in _unique(step.placement for step in steps):
        by_rho: dict[str, Any] = {}
        for rho in _unique(step.rho for step in steps):
            chosen = [step for step in steps if (step.placement, step.rho) == (placement, rho)]
            by_rho[f"{rho:g}"] = _of_arms(chosen)
        found[placement] = by_rho
    return found


def _of_arms(steps: Sequence[Measured]) -> dict[str, dict[str, float]]:
    by_arm = {arm: [step for step in steps if step.arm == arm] for arm in _unique(step.arm for step in steps)}
    found = {arm: _of_arm(of) for arm, of in by_arm.items()}
    batch = found.get(REFERENCE)
    for arm, of in found.items():
        if batch is None:
            continue
        of["ratio"] = batch["step_s"] / of["step_s"]
        of["paired_ratio"] = statistics.median(_paired(by_arm[REFERENCE], by_arm[arm]))
        if "tail_s" in of and batch["learner_s"] > 0:
            of["tail_share"] = of["tail_s"] / batch["learner_s"]
    return found


def _of_arm(steps: Sequence[Measured]) -> dict[str, float]:
    seconds = [step.metrics["step_s"] for step in steps]
    found = {
        "step_s": statistics.median(seconds),
        "step_min_s": min(seconds),
        "step_max_s": max(seconds),
        "num_steps": float(len(steps)),
    }
    names = dict(_NAMES)
    for name in steps[0].metrics:
        if name.startswith(("cpu_", "idle_")):
            names[name] = name
    for figure, metric in names.items():
        # a cause that never held in a step isn't among its metrics
        values = [step.metrics.get(metric, 0.0) for step in steps if metric in step.metrics or "idle" in metric]
        if values:
            found[figure] = statistics.median(values)
    return found


def _paired(left: Sequence[Measured], right: Sequence[Measured]) -> list[float]:
    """Return the ratios of the same steps' times; both arms took them in the same order."""
    return [a.metrics["step_s"] / b.metrics["step_s"] for a, b in zip(left, right, strict=True)]


def summary(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return `arms` and `ratios` of the JSON object: split placement at rho = 0, else empty."""
    arms: Mapping[str, Any] = found.get("split", {}).get("0", {})
    return {
        "arms": {arm: of["step_s"] for arm, of in arms.items()},
        "ratios": {arm: of["ratio"] for arm, of in arms.items() if arm != REFERENCE and "ratio" in of},
    }


def table(found: Mapping[str, Any]) -> str:
    """Return the figures as text, one line an arm."""
    lines = [f"{'placement':10}{'rho':>5}  {'arm':12}{'ratio':>7}" + "".join(f"{name:>13}" for name in SHOWN)]
    for placement, by_rho in found.items():
        for rho, arms in by_rho.items():
            for arm, of in arms.items():
                cells = "".join(f"{of[name]:13.3f}" if name in of else f"{'-':>13}" for name in SHOWN)
                ratio = f"{of['ratio']:7.3f}" if "ratio" in of else f"{'-':>7}"
                lines.append(f"{placement:10}{rho:>5}  {arm:12}{ratio}{cells}")
    return "\n".join(lines)


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
