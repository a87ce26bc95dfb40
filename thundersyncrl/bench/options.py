"""What the benchmarks' command lines share. They are argparse's, so that each benchmark also runs as a script."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any


def parser_of(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser of `thundersyncrl bench NAME` with the option `--json`."""
    parser = argparse.ArgumentParser(
        prog=f"thundersyncrl bench {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, the table on stderr")
    return parser


def positive(text: str) -> int:
    """Return a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is smaller.
        ValueError: it isn't a number.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {value}")
    return value


def print_figures(table: str, figures: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the table; with `as_json` on stderr, and the figures as one line on stdout."""
    print(table, file=sys.stderr if as_json else sys.stdout, flush=True)
    if as_json:
        print(json.dumps(dict(figures), allow_nan=False), flush=True)
