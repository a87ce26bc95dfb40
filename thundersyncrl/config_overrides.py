"""Overrides of config keys from the command line: `section.key=value`."""

from __future__ import annotations

import tomllib
from typing import Any, cast, get_origin

from pydantic import BaseModel

from thundersyncrl.config_keys import keys_of
from thundersyncrl.errors import ConfigError


def apply_override(data: dict[str, Any], override: str, model: type[BaseModel]) -> None:
    """Set the key that an override `section.key=value` names; `model=X` is short for `model.path=X`.

    Args:
        data: changed in place.
        override: its value is read as TOML, and as plain text where that fails.
        model: the config's class, which knows each key's type.

    Raises:
        ConfigError: not of that form, or a section is expected where a value stands.

    Example:
        >>> from thundersyncrl.config import Config
        >>> data = {"rollout": {"group_size": 4}}
        >>> apply_override(data, "rollout.temperature=0.7", Config)
        >>> data
        {'rollout': {'group_size': 4, 'temperature': 0.7}}
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"expected an override `section.key=value`, got {override!r}")
    if key == "model":
        key = "model.path"
    *sections, last = key.split(".")
    node = data
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"expected `{section}` to be a section, got the value {child!r} (override {override!r}); "
                "remove the value from the file"
            )
        node = cast(dict[str, Any], child)
    node[last] = _override_value(key, text, model)


def _override_value(dotted: str, text: str, model: type[BaseModel]) -> Any:
    """Return the value that the text of an override stands for, by the type of its key."""
    annotation = next((key.field.annotation for key in keys_of(model) if key.dotted == dotted), None)
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return text.split(",") if get_origin(annotation) is tuple else text
    # `run=2024-05-01` and `model.path=7` are text, though TOML reads a date and a number.
    return text if annotation is str and not isinstance(value, str) else value
