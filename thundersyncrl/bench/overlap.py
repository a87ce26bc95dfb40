"""`bench overlap`: step time by streaming level, on tools with heavy-tailed latencies and turn counts.

Every arm is the real training loop over an engine and a learner in processes of their own. The arms take the same
steps in turn, so that whatever else the machine does hits all alike; an arm that waits uses no CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from thundersyncrl.bench.options import parser_of, positive, print_figures
from thundersyncrl.bench.random_model import ModelSize, save_random_model
from thundersyncrl.bench.tool_world import LogNormal, Workload
from thundersyncrl.config import Stream

if TYPE_CHECKING:
    from thundersyncrl.bench.overlap_arms import Measured, Plan

LEVELS: tuple[str, ...] = get_args(Stream)
AHEAD = ("async1", "async2", "async3", "async4")
PLACEMENTS = ("split", "elastic")
_EXAMPLE = """
example:
  thundersyncrl bench overlap --steps 3 --rho 0 0.9 --json > overlap.json

`arms` of the JSON object are median seconds per step, `ratios` the batch arm's over each arm's, both in the split
placement at rho = 0; `details` has the rest, by placement, rho and arm. async1 to async4 run rollouts that many steps
ahead under older weights, at level "auto"; all others train on the weights that sampled.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its figures; return the exit code."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="thundersync-bench-") as folder:
        steps, conditions = _measure(options, Path(folder))
    from thundersyncrl.bench.overlap_figures import figures, summary, table

    found = figures(steps)
    _warn_if_busy(steps)
    taken = [{**asdict(step), "metrics": dict(step.metrics)} for step in steps]
    details: dict[str, Any] = {"conditions": conditions, "figures": found, "steps": taken}
    print_figures(table(found), {**summary(found), "details": details}, as_json=options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "overlap", "Measure the time of a training step by streaming level, where tools are slow and uneven.", _EXAMPLE
    )
    work, size = Workload(), ModelSize()
    add = parser.add_argument
    add(
        "--arms", nargs="+", choices=[*LEVELS, *AHEAD], default=[*LEVELS, "async1"], help="default: all but async2 to 4"
    )
    add("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS), help="default: both")
    add("--rho", nargs="+", type=_correlation, default=[0.0, 0.5, 0.9], help="correlations inside groups")
    add("--steps", type=positive, default=3, help="different steps of each arm at each rho (default: 3)")
    add("--repetitions", type=positive, default=1, help="how often all of them are taken (default: 1)")
    add("--groups", type=positive, default=work.num_groups, help=f"of a step (default: {work.num_groups})")
    add("--group-size", type=positive, default=work.group_size, help=f"default: {work.group_size}")
    add("--max-turns", type=positive, default=work.max_turns, help=f"default: {work.max_turns}")
    add(
        "--turn-tokens", type=positive, default=work.turn_tokens, help=f"sampled, at most (default: {work.turn_tokens})"
    )
    length = work.observation_tokens.median
    add("--observation", type=positive, default=int(length), help=f"median tokens (default: {length:g})")
    add("--tool", type=float, default=work.tool_s.median, help=f"median seconds (default: {work.tool_s.median:g})")
    add("--layers", type=positive, default=size.layers, help=f"of the model (default: {size.layers})")
    add("--width", type=positive, default=size.width, help=f"of the model (default: {size.width})")
    add("--threads", type=positive, default=None, help="for engine and learner together (default: every core)")
    add("--seed", type=int, default=0, help="of all draws (default: 0)")
    add("--no-sandbox", action="store_true", help="tools sleep in the controller, without processes of their own")
    return parser


def _correlation(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a correlation from 0 to 1, got {text}")
    return value


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the workload that the options describe."""
    work = Workload()
    return replace(
        work,
        num_groups=options.groups,
        group_size=options.group_size,
        turns=replace(work.turns, most=float(options.max_turns)),
        tool_s=_scaled(work.tool_s, options.tool),
        turn_tokens=options.turn_tokens,
        observation_tokens=_scaled(work.observation_tokens, options.observation),
        seed=options.seed,
    )


def _scaled(drawn: LogNormal, median: float) -> LogNormal:
    return replace(drawn, median=median, most=drawn.most * median / drawn.median)


def _measure(options: argparse.Namespace, folder: Path) -> tuple[list[Measured], dict[str, Any]]:
    """Return every step, and what a reader must know of the machine and the workload.

    Raises:
        ConfigError: no sandbox can be made here, and none was declined.
    """
    from thundersyncrl.bench.overlap_arms import Plan, side_by_side
    from thundersyncrl.build import num_threads_of
    from thundersyncrl.config import Config
    from thundersyncrl.environments.isolation import detect

    load = os.getloadavg()[0]
    work = workload_of(options)
    size = ModelSize(layers=options.layers, width=options.width)
    num_parameters = save_random_model(folder / "model", size, context_tokens=work.context_tokens, seed=work.seed)
    plan = Plan(
        workload=work,
        model=folder / "model",
        run=folder / "run",
        rhos=tuple(options.rho),
        num_steps=options.steps,
        repetitions=options.repetitions,
        num_threads=options.threads or num_threads_of(Config()),
        cores=frozenset(os.sched_getaffinity(0)),
        isolation=None if options.no_sandbox else detect(),
    )
    levels = list(dict.fromkeys(options.arms))
    steps: list[Measured] = []
    for placement in dict.fromkeys(options.placements):
        _say(f"{placement}: starting {len(levels)} arms")
        steps += asyncio.run(side_by_side(levels, placement, plan, heard=_hear))
    return steps, {"load_before": load, **_conditions(plan, num_parameters)}


def _hear(step: Measured) -> None:
    names = {"rollout": "time_rollout_s", "learner": "learner_busy_s", "left after rollouts": "time_learner_tail_s"}
    parts = ", ".join(f"{text} {step.metrics[name]:.2f}" for text, name in names.items())
    _say(
        f"{step.placement} rho={step.rho:g} step {step.step} {step.arm}: {step.metrics['step_s']:.2f} s ({parts}; "
        f"CPU: engine {step.metrics['cpu_engine_s']:.2f}, sandboxes {step.metrics['cpu_sandboxes_s']:.2f}, others on "
        f"this machine {step.metrics['cpu_others_s']:.2f}; {step.level})"
    )


def _warn_if_busy(steps: Sequence[Measured]) -> None:
    busy = sum(step.metrics["cpu_others_s"] for step in steps)
    have = len(os.sched_getaffinity(0)) * sum(step.metrics["step_s"] for step in steps)
    if busy > 0.05 * have:
        _say(f"note: other programs took {busy / have:.0%} of the machine; overlap needs idle cores, so ratios are low")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _conditions(plan: Plan, num_parameters: int) -> Mapping[str, Any]:
    import torch
    import transformers

    return {
        "cores": len(os.sched_getaffinity(0)),
        "threads": plan.num_threads,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "num_parameters": num_parameters,
        "dtype": "float32",
        "sandbox": plan.isolation is not None,
        "steps": plan.num_steps,
        "repetitions": plan.repetitions,
        "workload": asdict(plan.workload),
    }
