"""Files of one JSON object a line: appended at once, read back even when the last line was cut by a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from thundersyncrl.errors import ContractError, NumericsError


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one object and close the file again: a crash loses nothing, and a truncation isn't undone.

    Raises:
        NumericsError: a number that isn't finite; the message says under which key. Nothing is written.
    """
    append_lines(path, [row])


def append_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append several objects at once, as `append_line` does one.

    Raises:
        NumericsError: as `append_line`; then none of them is written.
    """
    text = "".join(_line(row, path) for row in rows)
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def replace_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Make these objects the whole file; a crash leaves the old file or the new one.

    Raises:
        NumericsError: as `append_line`.
    """
    part = path.with_name(path.name + ".part")
    text = "".join(_line(row, path) for row in rows)
    part.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(part, path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file; a last line without its newline was cut and is left out.

    Raises:
        ContractError: another line isn't a JSON object; the message gives its number.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row: Any = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ContractError(
                f"expected a JSON object, got {line[:60]!r} ({path}:{number}); mend the line or remove it"
            )
        rows.append(cast(dict[str, Any], row))
    return rows


def _line(row: Mapping[str, Any], path: Path) -> str:
    for key, value in _leaves(row, ""):
        if isinstance(value, float) and not math.isfinite(value):
            raise NumericsError(
                f"expected finite numbers, got {key}={value} ({path.name}); leave out a metric that can't be computed"
            )
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _leaves(value: Any, key: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return [leaf for name, inner in items for leaf in _leaves(inner, f"{key}.{name}" if key else name)]
    if isinstance(value, (list, tuple)):
        return [leaf for i, inner in enumerate(cast(list[Any], value)) for leaf in _leaves(inner, f"{key}[{i}]")]
    return [(key, value)]
