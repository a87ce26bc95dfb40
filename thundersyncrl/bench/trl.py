"""`bench trl`: trajectories per second of our training loop against GRPOTrainer of TRL, on a CPU.

The arms take the same steps in turn; the first of each warms up, figures are medians over the others. The workloads:

- `single`: one turn of `turns * turn_tokens` tokens, without a tool.
- `multi`: `turns` turns of `turn_tokens` tokens; between them a tool sleeps for a drawn time and prints a drawn text.

The same in both arms: a random float32 Qwen3 with a token a byte, all of its parameters trained (no LoRA), prompts,
groups, tool times, tools' texts, rewards, temperature 1, learning rate, threads, and one optimizer step a batch.
Sampled tokens are random and so aren't the same; a turn ends early where the model samples its end.

What was done to TRL, and what the figures depend on:

- A random model calls no tools. TRL's tokenizer gets a `parse_response` that reads a call in every text, and
  `max_tool_calling_iterations` ends the trajectory. Ours needs none of it: environments read a turn's text themselves.
- TRL has no limit of a turn; `generation_kwargs` gives it to `generate()`. `max_completion_length` is never reached.
- TRL runs the tool calls of a batch one after the other (1.16; an async tool only overlaps with calls of its own
  trajectory). So `multi` has the sum of all sleeps in each of TRL's steps, which dominates it where the model is
  small. `ratios_at_once` of the details is computed as if TRL made the calls of a turn at the same moment, and
  `--tool 0` measures without sleeps.
- TRL's defaults of bfloat16 and gradient checkpointing are off. It samples with `generate()` of transformers, which
  computes prompts and earlier turns anew at every turn; vLLM would be faster, and isn't used.
- All trajectories have the same number of turns, as TRL's parser can't know whose text it reads. Uneven turns would
  leave TRL's batches half empty, so this spares it.
- TRL is one process with all threads; ours is an engine and a learner that share them, and a controller. Ours writes
  new weights into the engine's memory, which is part of its step; TRL has nothing to move.
- Both have GRPO's loss without KL, and take log-probs of the trained policy once. TRL computes entropies as well, for
  its log. Its forwards pad, and have each trajectory's prompt; ours share the prompt of a group.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thundersyncrl.bench.options import parser_of, positive, print_figures
from thundersyncrl.bench.random_model import ModelSize, save_random_model
from thundersyncrl.bench.tool_world import LogNormal, Workload
from thundersyncrl.errors import ConfigError

if TYPE_CHECKING:
    from thundersyncrl.bench.trl_workload import Step

WORKLOADS = ("single", "multi")
_DEFAULT_TURNS = 4
_DEFAULT_TOOL_S = 0.2
_EXAMPLE = """
example:
  thundersyncrl bench trl --groups 2 --group-size 4 --steps 3 --json > trl.json

`arms` of the JSON object are median trajectories per second, named arm@workload; `ratios` are ours over TRL's, by
workload. TRL makes tool calls one after the other: see `ratios_at_once` of `details` for `multi` without that.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its figures; return the exit code.

    Raises:
        ConfigError: TRL isn't installed, is of another version, or sizes don't fit.
    """
    options = _parser().parse_args(argv)
    _check(options)
    trl_version = require_trl()
    with tempfile.TemporaryDirectory(prefix="thundersync-bench-") as folder:
        steps, conditions = _measure(options, Path(folder))
    found = figures(steps)
    found["details"]["conditions"] = {"trl": trl_version, **conditions}
    print_figures(table(found), found, as_json=options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("trl", "Measure training steps of our loop against GRPOTrainer of TRL, on this CPU.", _EXAMPLE)
    work, size = Workload(), ModelSize()
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: both")
    add("--layers", type=positive, default=size.layers, help=f"of the model (default: {size.layers})")
    add("--width", type=positive, default=size.width, help=f"of the model (default: {size.width})")
    add("--groups", type=positive, default=work.num_groups, help=f"of a step (default: {work.num_groups})")
    add("--group-size", type=_at_least_two, default=work.group_size, help=f"default: {work.group_size}")
    add("--turns", type=_at_least_two, default=_DEFAULT_TURNS, help=f"of multi (default: {_DEFAULT_TURNS})")
    add("--turn-tokens", type=positive, default=work.turn_tokens, help=f"at most (default: {work.turn_tokens})")
    add("--tool", type=_seconds, default=_DEFAULT_TOOL_S, help=f"median seconds (default: {_DEFAULT_TOOL_S:g})")
    add("--steps", type=positive, default=3, help="timed steps of each arm and workload (default: 3)")
    add("--micro-batch", type=positive, default=None, help="trajectories of TRL's forwards (default: group size)")
    add("--threads", type=positive, default=None, help="compute threads (default: every core)")
    add("--seed", type=int, default=0, help="of all draws (default: 0)")
    return parser


def _at_least_two(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2, got {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 3600.0:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to 3600, got {text}")
    return value


def _check(options: argparse.Namespace) -> None:
    total = options.groups * options.group_size
    if options.micro_batch and total % options.micro_batch:
        raise ConfigError(
            f"expected a `--micro-batch` that divides the {total} trajectories of a step, got {options.micro_batch}; "
            "TRL refuses others"
        )


def require_trl() -> str:
    """Return the version of TRL; it isn't loaded.

    Raises:
        ConfigError: there is none, or it is another than was tried.
    """
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError("expected the package `trl` to compare with, got none; install thundersyncrl[trl]") from error
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (1, 16) or major >= 2:
        raise ConfigError(f"expected `trl` of at least 1.16 and below 2, got {version}; install thundersyncrl[trl]")
    return version


def workload_of(options: argparse.Namespace, name: str) -> Workload:
    """Return what the steps of a workload are made of."""
    turns = 1 if name == "single" else options.turns
    work = Workload()
    return replace(
        work,
        num_groups=options.groups,
        group_size=options.group_size,
        turns=LogNormal(median=float(turns), sigma=0.0, least=float(turns), most=float(turns)),
        tool_s=replace(work.tool_s, median=options.tool, most=options.tool * work.tool_s.most / work.tool_s.median),
        turn_tokens=options.turns * options.turn_tokens // turns,
        seed=options.seed,
    )


def _measure(options: argparse.Namespace, folder: Path) -> tuple[list[Step], Mapping[str, Any]]:
    """Return every timed step, and what a reader must know of the machine and the workloads."""
    import torch
    import transformers

    from thundersyncrl.bench.trl_arms import side_by_side
    from thundersyncrl.bench.trl_workload import Setup
    from thundersyncrl.build import num_threads_of
    from thundersyncrl.config import Config

    load, threads = os.getloadavg()[0], options.threads or num_threads_of(Config())
    works = {name: workload_of(options, name) for name in dict.fromkeys(options.workloads)}
    longest = max(work.context_tokens for work in works.values())
    size = ModelSize(layers=options.layers, width=options.width)
    num_parameters = save_random_model(folder / "model", size, context_tokens=longest, seed=options.seed)
    micro_batch = options.micro_batch or options.group_size
    steps: list[Step] = []
    for name, work in works.items():
        _say(f"{name}: starting both arms")
        setup = Setup(
            name=name,
            work=work,
            folder=folder,
            num_steps=options.steps,
            num_threads=threads,
            micro_batch=micro_batch,
        )
        steps += asyncio.run(side_by_side(setup, heard=_hear))
    return steps, {
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "load_before": load,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "num_parameters": num_parameters,
        "layers": size.layers,
        "width": size.width,
        "dtype": "float32",
        "lora": False,
        "steps": options.steps,
        "trl_micro_batch": micro_batch,
        "workloads": {name: asdict(work) for name, work in works.items()},
    }


def _hear(step: Step) -> None:
    note = "" if step.number else " (warm-up)"
    _say(f"{step.workload} step {step.number} {step.arm}: {step.seconds:.2f} s, {step.num_tokens} tokens{note}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def figures(steps: Sequence[Step]) -> dict[str, Any]:
    """Return `arms` (arm@workload -> median trajectories per second), `ratios` (workload -> ours over TRL), `details`.

    `details` has medians of trained tokens per second, the ratios of tokens per second, and `ratios_at_once`: ours
    over TRL as if TRL had made the tool calls of a turn at the same moment, for workloads with tools.
    """
    by_name: dict[str, list[Step]] = {}
    for step in steps:
        by_name.setdefault(f"{step.arm}@{step.workload}", []).append(step)
    arms = {n: statistics.median(s.num_trajectories / s.seconds for s in of) for n, of in by_name.items()}
    tokens = {n: statistics.median(s.num_tokens / s.seconds for s in of) for n, of in by_name.items()}
    at_once = {
        name: statistics.median(s.num_trajectories / (s.seconds - s.tool_s + s.tools_at_once_s) for s in of)
        for name, of in by_name.items()
        if name.startswith("trl@") and any(s.turns > 1 for s in of)
    }
    workloads = list(dict.fromkeys(step.workload for step in steps))
    return {
        "arms": arms,
        "ratios": {w: arms[f"ours@{w}"] / arms[f"trl@{w}"] for w in workloads},
        "details": {
            "tokens_per_s": tokens,
            "token_ratios": {w: tokens[f"ours@{w}"] / tokens[f"trl@{w}"] for w in workloads},
            "trl_at_once": at_once,
            "ratios_at_once": {w: arms[f"ours@{w}"] / at_once[f"trl@{w}"] for w in workloads if f"trl@{w}" in at_once},
            "steps": [asdict(step) for step in steps],
        },
    }


def table(found: Mapping[str, Any]) -> str:
    """Return the figures as text, one line a workload."""
    arms, details = found["arms"], found["details"]
    heads = ("trl traj/s", "ours traj/s", "ratio", "trl tok/s", "ours tok/s", "ratio", "at once")
    lines = [f"{'workload':10}" + "".join(f"{head:>13}" for head in heads)]
    for workload, ratio in found["ratios"].items():
        tokens = details["tokens_per_s"]
        cells = (
            *(arms[f"trl@{workload}"], arms[f"ours@{workload}"], ratio),
            *(tokens[f"trl@{workload}"], tokens[f"ours@{workload}"], details["token_ratios"][workload]),
        )
        at_once = details["ratios_at_once"].get(workload)
        last = f"{'-':>13}" if at_once is None else f"{at_once:13.2f}"
        lines.append(f"{workload:10}" + "".join(f"{cell:13.2f}" for cell in cells) + last)
    lines.append("ratio: ours over TRL; at once: the same, as if TRL made the tool calls of a turn at the same moment")
    return "\n".join(lines)
