"""Read the model's reply as an action: a shell command, "finished", or something malformed.

The protocol: a reply holds one fenced bash block; a last line `DONE` after it says that the task will be
finished by it. `DONE` alone finishes. Only the first block of a reply is run. A model whose chat template has
tool calls may answer with `<tool_call>{"name": "bash", "arguments": {"command": "..."}}</tool_call>` or with
the same JSON bare or in a ```json block instead. A call that can't be read is never run with guessed
arguments.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, cast

DONE = "DONE"

EXPECTED = f"Expected one ```bash block, or {DONE}."

MAX_COMMAND_BYTES = 100_000
"""Linux passes at most 128 KiB in one argument."""

_SHELL_LANGUAGES = frozenset({"", "bash", "sh", "shell", "console"})
_SHELL_TOOLS = frozenset({"bash", "sh", "shell", "terminal", "execute_bash", "run_command", "execute_command"})
_FINISH_TOOLS = frozenset({"done", "finish", "submit"})
_COMMAND_KEYS = ("command", "cmd")

# As in CommonMark, a fence ends at a line of at least as many backticks; a longer fence may hold shorter
# ones.
_FENCE = re.compile(
    r"^[ \t]*(?P<ticks>`{3,})[ \t]*(?P<language>[^\n`]*)\n(?P<body>.*?)^[ \t]*(?P=ticks)`*[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_FENCE_START = re.compile(r"^[ \t]*`{3,}", re.MULTILINE)
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_END_MARKERS = re.compile(r"(?:\s*<\|[A-Za-z0-9_]+\|>)+\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A shell command to run."""

    text: str
    is_last: bool = False
    """True when the agent said that the task is finished by this command."""
    num_ignored: int = 0
    """Further blocks or calls of the same reply, which aren't run."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The agent said that it has finished."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A reply that is neither; nothing is run."""

    reason: str
    """Short, for the model: what was wrong and what was expected."""


Action = Command | Finish | Malformed


def parse_action(reply: str) -> Action:
    r"""Return the action of a model's reply.

    Example:
        >>> parse_action("I look first.\n```bash\nls -l\n```")
        Command(text='ls -l', is_last=False, num_ignored=0)
        >>> parse_action("```bash\ntouch a\n```\nDONE").is_last
        True
        >>> parse_action("DONE")
        Finish()
        >>> parse_action('<tool_call>{"name": "bash", "arguments": {"command": "ls"}</tool_call>').reason
        'The tool call is not valid JSON. Expected one ```bash block, or DONE.'
    """
    text = _END_MARKERS.sub("", reply)
    if "<think>" in text or "</think>" in text:
        _, closed, text = text.rpartition("</think>")
        if not closed or "<think>" in text:
            return _malformed("The thought has no end.")
    text = text.strip()
    if text == DONE:
        return Finish()
    if "<tool_call>" in text:
        return _parse_tool_calls(text)
    if text.startswith("{"):
        return _parse_call(text, is_last=False, num_ignored=0)
    return _parse_blocks(text)


def _malformed(reason: str) -> Malformed:
    return Malformed(f"{reason} {EXPECTED}")


def _says_done(rest: str) -> bool:
    lines = [line.strip() for line in rest.splitlines() if line.strip()]
    return bool(lines) and lines[-1] == DONE


def _parse_blocks(text: str) -> Action:
    blocks = list(_FENCE.finditer(text))
    if not blocks:
        if _FENCE_START.search(text):
            return _malformed("The block has no closing ``` line.")
        return _malformed("No command found." if text else "The reply is empty.")
    first = blocks[0]
    language = first["language"].strip().lower()
    # With blocks left over the agent has more to do than what is run now, whatever it says.
    is_last = len(blocks) == 1 and _says_done(text[first.end() :])
    if language == "json":
        return _parse_call(first["body"], is_last=is_last, num_ignored=len(blocks) - 1)
    if language not in _SHELL_LANGUAGES:
        return _malformed(f"A block of `{language[:20]}` can't be run.")
    return _command(first["body"], is_last=is_last, num_ignored=len(blocks) - 1)


def _command(text: str, *, is_last: bool, num_ignored: int) -> Action:
    text = text.strip("\n")
    if not text.strip():
        return _malformed("The command is empty.")
    if "\0" in text:
        return _malformed("The command holds a NUL character.")
    if len(text.encode("utf-8", errors="replace")) > MAX_COMMAND_BYTES:
        return _malformed(f"The command is longer than {MAX_COMMAND_BYTES} bytes.")
    return Command(text=text, is_last=is_last, num_ignored=num_ignored)


def _parse_tool_calls(text: str) -> Action:
    calls = list(_TOOL_CALL.finditer(text))
    if not calls:
        return _malformed("The tool call has no end.")
    is_last = len(calls) == 1 and _says_done(text[calls[0].end() :])
    return _parse_call(calls[0][1], is_last=is_last, num_ignored=len(calls) - 1)


def _parse_call(text: str, *, is_last: bool, num_ignored: int) -> Action:
    try:
        # Not strict: models put raw line breaks into JSON strings, which has only one possible meaning.
        call: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return _malformed("The tool call is not valid JSON.")
    if not isinstance(call, dict):
        return _malformed("The tool call is not a JSON object.")
    fields = cast(dict[str, Any], call)
    name = fields.get("name", "bash")
    if name in _FINISH_TOOLS:
        return Finish()
    if not isinstance(name, str) or name not in _SHELL_TOOLS:
        return _malformed(f"There is no tool {str(name)[:20]!r}; the tool is 'bash' with `command`.")
    arguments = _arguments(fields)
    found = [arguments[key] for key in _COMMAND_KEYS if key in arguments]
    if len(found) != 1 or not isinstance(found[0], str):
        return _malformed("The tool call needs a string `command`.")
    return _command(found[0], is_last=is_last, num_ignored=num_ignored)


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments: object = call.get("arguments", call.get("parameters", call))
    if isinstance(arguments, str):  # some templates put the arguments as JSON into a string
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return {}
    return cast(dict[str, Any], arguments) if isinstance(arguments, dict) else {}
