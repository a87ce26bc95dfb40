"""Writes docs/configuration.md from the fields of the config tree; with --check, fails when the page is old.

python scripts/document_config.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic_core import PydanticUndefined

from thundersyncrl.config import Config
from thundersyncrl.config_keys import ConfigKey, keys_of
from thundersyncrl.config_toml import to_toml_value

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

INTRODUCTION = """# Configuration

<!-- Written by scripts/document_config.py from thundersyncrl/config.py; change the fields there. -->

A run is one TOML file, with `key=value` overrides after it on the command line:

    thundersyncrl train run.toml steps=40 learner.learning_rate=2e-5 evaluation=none

- Every key has a default; the empty file is a valid run. The resolved config of a run is its `config.toml`.
- An unknown key is an error that names the closest valid one. So is an option that has no effect in the chosen mode.
- TOML has no null: the text `"none"` stands for it, where the table says so.
- An override's value is TOML, or plain text where that fails. `model=X` is short for `model.path=X`.
"""


def page() -> str:
    """Return the whole page."""
    keys = keys_of(Config)
    top = [key for key in keys if not key.parent and key.section is None]
    parts = [INTRODUCTION, "## Top level\n", _table(top)]
    for key in keys:
        if key.section is not None:
            inner = [k for k in keys if k.parent == key.dotted and k.section is None]
            parts += [f"## `[{key.dotted}]`\n", f"{_text(key)}{_absence(key)}\n", _table(inner)]
    return "\n".join(parts)


def _table(keys: list[ConfigKey]) -> str:
    rows = [f"| `{key.name}` | {_escaped(key.type_text)} | `{_default(key)}` | {_text(key)} |" for key in keys]
    return "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _absence(key: ConfigKey) -> str:
    if not key.may_be_none:
        return ""
    if key.field.default is None:
        return " Absent unless the table is there, be it empty."
    return ' Set to `"none"` to leave it out.'


def _default(key: ConfigKey) -> str:
    default = key.field.default
    return "required" if default is PydanticUndefined else to_toml_value(default)


def _text(key: ConfigKey) -> str:
    return _escaped(" ".join((key.field.description or "").split()))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE} is old: run `python scripts/document_config.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
