"""What commands share: arguments, options, the exit code of a refusal, and the one JSON line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_CONFIG = 2

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Such as rollout.group_size=4.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, everything else on stderr.")]


def print_json(result: Mapping[str, Any]) -> None:
    """Print the result of a command that a machine reads, as one line on stdout."""
    print(json.dumps(dict(result), allow_nan=False), flush=True)
