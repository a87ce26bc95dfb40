"""The command `report`: a run's page, its trace, and its figures as JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from thundersyncrl.command_options import AsJson, print_json


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show where each second of a run went: one HTML page, and a trace for Perfetto.

    \b
    Example:
        thundersyncrl report runs/first --open
    """
    from thundersyncrl.observe.report import read_run, report_json, write_report
    from thundersyncrl.runtime.run_folder import RunFolder

    folder = RunFolder(run)
    recorded = read_run(folder)
    write_report(folder, recorded)
    for problem in recorded.problems:
        print(f"note: {problem}", file=sys.stderr, flush=True)
    if as_json:
        print_json(report_json(folder, recorded))
    else:
        print(f"wrote {folder.report} and {folder.trace}; open the trace at https://ui.perfetto.dev", flush=True)
    if show:
        typer.launch(str(folder.report))
