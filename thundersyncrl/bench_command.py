"""The commands `bench learner`, `bench overlap`, `bench engine` and `bench trl`: arms side by side in one call."""

from __future__ import annotations

from typing import Any

import typer

bench_app = typer.Typer(
    help="Measure what streaming costs, what it hides, and how fast sampling is; arms interleaved in one call.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

# The options belong to the benchmark, which also runs as a script of its own.
_PASSED_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}


@bench_app.command("learner", context_settings=_PASSED_ON, add_help_option=False)
def learner(context: typer.Context) -> None:
    """Busy CPU seconds of the learner's levels against plain transformers.

    \b
    Example:
        thundersyncrl bench learner --repetitions 3 --json
    """
    from thundersyncrl.bench.learner import main

    raise SystemExit(main(context.args))


@bench_app.command("overlap", context_settings=_PASSED_ON, add_help_option=False)
def overlap(context: typer.Context) -> None:
    """Step time of the levels with slow tools, on split and on shared cores.

    \b
    Example:
        thundersyncrl bench overlap --steps 3 --json
    """
    from thundersyncrl.bench.overlap import main

    raise SystemExit(main(context.args))


@bench_app.command("engine", context_settings=_PASSED_ON, add_help_option=False)
def engine(context: typer.Context) -> None:
    """Sampled tokens per second of the embedded engine against generate() of transformers.

    \b
    Example:
        thundersyncrl bench engine --batch 8 32 --json
    """
    from thundersyncrl.bench.engine import main

    raise SystemExit(main(context.args))


@bench_app.command("trl", context_settings=_PASSED_ON, add_help_option=False)
def trl(context: typer.Context) -> None:
    """Trajectories per second of training steps against GRPOTrainer of TRL.

    \b
    Example:
        thundersyncrl bench trl --groups 2 --group-size 4 --json
    """
    from thundersyncrl.bench.trl import main

    raise SystemExit(main(context.args))
