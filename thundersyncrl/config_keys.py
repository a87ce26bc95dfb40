"""Dotted names of a config tree: list them, flatten a config to them, explain a refusal in them.

Imports no torch.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_SHOWN_CHARS = 80
_SAME_NAME = 2.0
_LEAST_LIKENESS = 0.6
_SECTION_FAVOUR = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One place in the config tree."""

    dotted: str
    """Such as "rollout.temperature"."""
    field: FieldInfo
    section: type[BaseModel] | None
    """The section that lies here; None for a value."""

    @property
    def name(self) -> str:
        return self.dotted.rpartition(".")[2]

    @property
    def parent(self) -> str:
        return self.dotted.rpartition(".")[0]

    @property
    def may_be_none(self) -> bool:
        return may_be_none(self.field)

    @property
    def type_text(self) -> str:
        """The type as people write it.

        Example:
            >>> class Example(BaseModel):
            ...     size: int | None = None
            >>> keys_of(Example)[0].type_text
            'int or "none"'
        """
        return _type_text(self.field.annotation)


def keys_of(root: type[BaseModel], prefix: str = "") -> list[ConfigKey]:
    """Return every key below `root`, sections before what they hold, in the order of their definition."""
    found: list[ConfigKey] = []
    for name, field in root.model_fields.items():
        section = _section_of(field.annotation)
        found.append(ConfigKey(dotted=prefix + name, field=field, section=section))
        if section is not None:
            found += keys_of(section, f"{prefix}{name}.")
    return found


def may_be_none(field: FieldInfo) -> bool:
    """Return True when the field's type has None."""
    return type(None) in get_args(field.annotation)


def flatten(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Return every value by its dotted name; an absent section is one None.

    Example:
        >>> class Inner(BaseModel):
        ...     size: int = 3
        >>> class Outer(BaseModel):
        ...     inner: Inner = Inner()
        ...     other: Inner | None = None
        >>> flatten(Outer())
        {'inner.size': 3, 'other': None}
    """
    values: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            values.update(flatten(value, f"{prefix}{name}."))
        else:
            values[prefix + name] = value
    return values


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """Return a line for each thing that is wrong; an unknown key comes with the valid one that was meant."""
    lines: list[str] = []
    for item in error.errors():
        if item["type"] == "extra_forbidden":
            section, unknown = _place(item["loc"][:-1], root), str(item["loc"][-1])
            lines.append(_explain_unknown(unknown, section, root))
            continue
        dotted = _place(item["loc"], root)
        message = item["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        got = "" if item["type"] in ("value_error", "missing") else f", got {_shown(item['input'])}"
        lines.append(f"`{dotted}`: {message}{got}" if dotted else message + got)
    return "\n".join(dict.fromkeys(lines))


def suggest(unknown: str, section: str, root: type[BaseModel]) -> list[str]:
    """Return the dotted names that were probably meant, the likeliest first; empty when nothing is close.

    The same name wins, wherever it is; then the closest, with some favour for the section it was found in.

    Args:
        section: dotted name of the section that holds the unknown key; empty at the top level.

    Example:
        >>> from thundersyncrl.config import Config
        >>> suggest("temprature", "rollout", Config), suggest("group_size", "learner", Config)
        (['rollout.temperature'], ['rollout.group_size'])
    """
    keys = keys_of(root)
    scores = {key.dotted: _likeness(unknown, section, key) for key in keys}
    best = max(scores.values())
    return [name for name, score in scores.items() if score == best] if best >= _LEAST_LIKENESS else []


def _likeness(unknown: str, section: str, key: ConfigKey) -> float:
    if key.name == unknown:
        return _SAME_NAME
    ratio = difflib.SequenceMatcher(None, unknown, key.name).ratio()
    return ratio + (_SECTION_FAVOUR if key.parent == section else 0.0)


def _explain_unknown(unknown: str, section: str, root: type[BaseModel]) -> str:
    dotted = f"{section}.{unknown}" if section else unknown
    where = f"section [{section}]" if section else "the top level"
    meant = suggest(unknown, section, root)
    if meant:
        hint = "did you mean " + " or ".join(f"`{name}`" for name in meant) + "?"
    else:
        valid = [key.name for key in keys_of(root) if key.parent == section]
        hint = f"valid keys are {', '.join(valid)}"
    return f"unknown key `{dotted}` in {where}; {hint}"


def _place(location: Sequence[int | str], root: type[BaseModel]) -> str:
    """Return the dotted name of a pydantic location, without the tags of union members."""
    sections = {key.dotted: key.section for key in keys_of(root)}
    dotted = ""
    for part in location:
        deeper = f"{dotted}.{part}" if dotted else str(part)
        if isinstance(part, int):
            dotted += f"[{part}]"
        elif deeper in sections:
            dotted = deeper
    return dotted


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _type_text(annotation: Any) -> str:
    arguments = get_args(annotation)
    if annotation is type(None):
        return '"none"'
    if isinstance(annotation, types.UnionType) or str(annotation).startswith("typing.Optional"):
        return " or ".join(_type_text(argument) for argument in arguments)
    if str(annotation).startswith("typing.Literal"):
        return ", ".join(f'"{argument}"' for argument in arguments)
    if arguments and arguments[-1] is Ellipsis:
        return f"list of {_type_text(arguments[0])}"
    if arguments:
        return f"list of {len(arguments)} {_type_text(arguments[0])}"
    if _section_of(annotation) is not None:
        return "section"
    return {"str": "text", "int": "int", "float": "number", "bool": "true or false"}[annotation.__name__]
