"""A config tree as TOML text. Imports no torch."""

from __future__ import annotations

import json
from typing import Any, cast

from pydantic import BaseModel


def to_toml(config: BaseModel) -> str:
    """Return TOML that reads back to an equal config; every key is written, the defaults too.

    Example:
        >>> class Inner(BaseModel):
        ...     sizes: tuple[int, ...] = (1, 2)
        >>> class Outer(BaseModel):
        ...     name: str = "a"
        ...     rate: float | None = None
        ...     inner: Inner = Inner()
        >>> print(to_toml(Outer()), end="")
        name = "a"
        rate = "none"
        <BLANKLINE>
        [inner]
        sizes = [1, 2]
    """
    return "\n".join(_toml_lines(config, "")) + "\n"


def _toml_lines(section: BaseModel, prefix: str) -> list[str]:
    lines: list[str] = []
    deeper: list[str] = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            deeper += ["", f"[{prefix}{name}]", *_toml_lines(value, f"{prefix}{name}.")]
        else:
            lines.append(f"{name} = {to_toml_value(value)}")
    return lines + deeper  # a table's own values must come before its sub-tables


def to_toml_value(value: Any) -> str:
    """Return a value of a config as TOML.

    Example:
        >>> to_toml_value(1e-5), to_toml_value(True), to_toml_value(None), to_toml_value(("a",))
        ('1e-05', 'true', '"none"', '["a"]')
        >>> to_toml_value({"a b": 2.0})
        '{"a b" = 2.0}'
    """
    if value is None:
        return '"none"'
    if isinstance(value, tuple):
        return "[" + ", ".join(to_toml_value(item) for item in cast(tuple[Any, ...], value)) + "]"
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return "{" + ", ".join(f"{to_toml_value(key)} = {to_toml_value(item)}" for key, item in items) + "}"
    # A JSON string, number or truth value is TOML too, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
