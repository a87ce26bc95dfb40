"""Read the model's reply as an action: a shell command, "finished", or something malformed.

The protocol: a reply holds one fenced bash block; a last line `DONE` after it says that the task will be
finished by it. `DONE` alone finishes. Only the first block of a reply is run. A model whose chat template has
tool calls may answer with `<tool_call>{"name": "bash", "arguments": {"command": "..."}}</tool_call>` or with
the same JSON bare or in a ```json block instead. A call that can't be read is never run with guessed
arguments.
"""

from __future__ import annotations

import itertools
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
_FENCE_OPEN = re.compile(r"[ \t]*+(`{3,}+)([^`]*+)")
_FENCE_CLOSE = re.compile(r"[ \t]*+(`{3,}+)[ \t]*+")
_FENCE_START = re.compile(r"^[ \t]*+`{3,}", re.MULTILINE)
_CALL_START, _CALL_END = "<tool_call>", "</tool_call>"
_END_MARKER = re.compile(r"<\|[A-Za-z0-9_]+\|>")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    language: str
    body: str
    end: int
    """Where its last line ends in the reply."""


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
    text = _without_end_markers(reply)
    if "<think>" in text or "</think>" in text:
        _, closed, text = text.rpartition("</think>")
        if not closed or "<think>" in text:
            return _malformed("The thought has no end.")
    text = text.strip()
    if text == DONE:
        return Finish()
    if _CALL_START in text:
        return _parse_tool_calls(text)
    if text.startswith("{"):
        return _parse_call(text, is_last=False, num_ignored=0)
    return _parse_blocks(text)


def _malformed(reason: str) -> Malformed:
    return Malformed(f"{reason} {EXPECTED}")


def _says_done(rest: str) -> bool:
    lines = [line.strip() for line in rest.splitlines() if line.strip()]
    return bool(lines) and lines[-1] == DONE


# What follows reads a reply in a time that grows with its length alone: a pattern that tries every start with every
# end takes minutes for a long reply of nothing but fences, and the whole run waits.


def _without_end_markers(text: str) -> str:
    end = len(text.rstrip())
    while (start := text.rfind("<|", 0, end)) >= 0 and _END_MARKER.fullmatch(text, start, end):
        end = start
        while end and text[end - 1].isspace():
            end -= 1
    return text[:end]


def _blocks(text: str) -> list[_Block]:
    """Return the fenced blocks that have an end."""
    lines = text.split("\n")
    ends = list(itertools.accumulate(len(line) + 1 for line in lines))
    blocks: list[_Block] = []
    hopeless = len(text) + 1  # no line that is left closes a fence of so many backticks
    number = 0
    while number < len(lines):
        opened = _FENCE_OPEN.fullmatch(lines[number])
        number += 1
        if opened is None or len(opened[1]) >= hopeless:
            continue
        close = next((n for n in range(number, len(lines)) if _closes(lines[n], len(opened[1]))), None)
        if close is None:
            hopeless = len(opened[1])
            continue
        body = "\n".join(lines[number:close])
        blocks.append(_Block(language=opened[2].strip().lower(), body=body, end=ends[close] - 1))
        number = close + 1
    return blocks


def _closes(line: str, num_ticks: int) -> bool:
    closed = _FENCE_CLOSE.fullmatch(line)
    return closed is not None and len(closed[1]) >= num_ticks


def _calls(text: str) -> list[tuple[str, int]]:
    """Return the text and the end of each tool call that has an end."""
    calls: list[tuple[str, int]] = []
    after = 0
    while (start := text.find(_CALL_START, after)) >= 0 and (end := text.find(_CALL_END, start)) >= 0:
        after = end + len(_CALL_END)
        calls.append((text[start + len(_CALL_START) : end], after))
    return calls


def _parse_blocks(text: str) -> Action:
    blocks = _blocks(text)
    if not blocks:
        if _FENCE_START.search(text):
            return _malformed("The block has no closing ``` line.")
        return _malformed("No command found." if text else "The reply is empty.")
    first = blocks[0]
    # With blocks left over the agent has more to do than what is run now, whatever it says.
    is_last = len(blocks) == 1 and _says_done(text[first.end :])
    if first.language == "json":
        return _parse_call(first.body, is_last=is_last, num_ignored=len(blocks) - 1)
    if first.language not in _SHELL_LANGUAGES:
        return _malformed(f"A block of `{first.language[:20]}` can't be run.")
    return _command(first.body, is_last=is_last, num_ignored=len(blocks) - 1)


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
    calls = _calls(text)
    if not calls:
        return _malformed("The tool call has no end.")
    is_last = len(calls) == 1 and _says_done(text[calls[0][1] :])
    return _parse_call(calls[0][0], is_last=is_last, num_ignored=len(calls) - 1)


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
