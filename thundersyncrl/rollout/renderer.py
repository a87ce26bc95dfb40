"""Token-exact rendering: the prompt of a chat, and the tokens that its template adds after an assistant turn.

Append-only, with thinking kept: what was sampled is never encoded again, and what a template would take out
of earlier assistant turns (a think block, say) stays. So every sampled token is trained in the context that
it was sampled in.

Only the template's own text gives control tokens. The same strings inside instructions, system prompts and
tool outputs are encoded as plain text, so that no tool can end a turn or open another.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from thundersyncrl.errors import ConfigError

_SYSTEM, _USER, _ACTION, _OBSERVATION, _ACTION_2, _OBSERVATION_2 = (
    f"ThunderSentinel{name}End" for name in ("System", "User", "Action", "Observation", "ActionTwo", "ObservationTwo")
)
_SPACE = "\n \n"
"""Put around a sentinel to see whether the template strips its messages."""


class AddedToken(Protocol):
    """An entry that the tokenizer takes out of a text before anything else."""

    @property
    def content(self) -> str: ...

    @property
    def special(self) -> bool: ...


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that rendering needs."""

    @property
    def chat_template(self) -> Any: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """Template text with a gap for each message: literal, gap, literal, ..., literal."""

    literals: tuple[str, ...]
    strips: tuple[bool, ...]
    """For each gap, whether the template strips white space around the message."""

    def fill(self, contents: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the span of each message in it."""
        text, spans = self.literals[0], list[tuple[int, int]]()
        for content, strips, literal in zip(contents, self.strips, self.literals[1:], strict=True):
            content = content.strip() if strips else content
            spans.append((len(text), len(text) + len(content)))
            text += content + literal
        return text, spans


class Renderer:
    """Renders chats as token ids with one tokenizer's chat template; nothing here pads.

    Args:
        tokenizer: a transformers tokenizer with a chat template and an eos token. A pad token isn't needed.

    Raises:
        ConfigError: no chat template; no eos token; a template that fails, loses messages, ends an assistant
            turn without a control token, or changes earlier text when turns are added.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "expected a tokenizer with a chat template, got none; take an instruct model, or put a "
                "`chat_template.jinja` into the model's folder"
            )
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                "expected a tokenizer with an eos token, got none; name the token that ends an answer as "
                "`eos_token` in the model's `tokenizer_config.json`"
            )
        self._tokenizer = tokenizer
        self._controls = _control_pattern(tokenizer.added_tokens_decoder)
        self._prompt = _form(tokenizer, ["system", "user"], [_SYSTEM, _USER])
        self._bare_prompt = _form(tokenizer, ["user"], [_USER])
        self._suffix = _suffix_form(tokenizer, self._prompt)
        self._end_of_turn = self._find_end_of_turn(self._suffix.literals[0])
        self._stop_ids = frozenset({self._end_of_turn, tokenizer.eos_token_id})

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an assistant turn when sampled: the template's end of turn and the tokenizer's eos."""
        return self._stop_ids

    @property
    def end_of_turn_id(self) -> int:
        """The control token with which the template ends an assistant turn."""
        return self._end_of_turn

    def prompt(self, system: str, user: str) -> tuple[int, ...]:
        """Return the prompt's ids, up to where the assistant's first token comes.

        Args:
            system: how the agent is told to act. Empty leaves the system message out; a template may
                then put its own there.
            user: the instruction.
        """
        if system:
            return self._encode(self._prompt, [system, user])
        return self._encode(self._bare_prompt, [user])

    def suffix(self, observation: str, *, last_id: int) -> tuple[int, ...]:
        """Return the ids between the last token of an assistant turn and the first of the next one.

        These are the end of turn (unless the model sampled it), the observation as a user message, and the
        next assistant header.

        Args:
            observation: what the agent sees.
            last_id: last token sampled in the assistant turn.
        """
        ids = self._encode(self._suffix, [observation])
        return ids[1:] if last_id == self._end_of_turn else ids

    def action(self, text: str) -> tuple[int, ...]:
        """Return the ids of an assistant turn that wasn't sampled (an oracle's), end of turn included."""
        plain = _Form(literals=("", ""), strips=(False,))
        return (*self._encode(plain, [text]), self._end_of_turn)

    def text(self, ids: Sequence[int]) -> str:
        """Return sampled ids as text without special tokens, for environments and people."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _encode(self, form: _Form, contents: Sequence[str]) -> tuple[int, ...]:
        """Encode as the template would, except that no control token comes out of a message.

        The text goes to the tokenizer whole, so merges across the seams are the template's. Only where a
        message holds a control string is the text cut, inside that string, and each part encoded on its own.
        """
        text, spans = form.fill(contents)
        cuts = [
            match.start() + 1
            for match in self._controls.finditer(text)
            if any(match.start() < end and begin < match.end(1) for begin, end in spans)
        ]
        edges = [0, *cuts, len(text)]
        ids: list[int] = []
        for begin, end in itertools.pairwise(edges):
            ids += self._tokenizer.encode(text[begin:end], add_special_tokens=False)
        return tuple(ids)

    def _find_end_of_turn(self, literal: str) -> int:
        ids = self._tokenizer.encode(literal, add_special_tokens=False)
        added = self._tokenizer.added_tokens_decoder
        if not ids or ids[0] not in added or not literal.startswith(added[ids[0]].content):
            raise ConfigError(
                "expected a chat template that ends an assistant turn with a control token, got "
                f"{literal[:40]!r} after it; without one the model can't end its turn. Use another one"
            )
        return ids[0]


def _control_pattern(added: Mapping[int, AddedToken]) -> re.Pattern[str]:
    """Match (without consuming) every place where a control string begins; group 1 is the string.

    Control strings are the special tokens, and those added ones that are written in brackets, such as
    `<tool_call>`. Other added entries (words, runs of spaces) are plain vocabulary.
    """
    controls = {t.content for t in added.values() if t.special or re.fullmatch(r"<.+>|\[.+\]", t.content)}
    longest_first = sorted((c for c in controls if len(c) > 1), key=len, reverse=True)
    return re.compile(f"(?=({'|'.join(map(re.escape, longest_first)) or '(?!)'}))")


def _render(tokenizer: ChatTokenizer, roles: Sequence[str], contents: Sequence[str]) -> str:
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is user code and may raise anything
        raise ConfigError(
            f"expected a chat template that takes messages of the roles {', '.join(roles)}, got "
            f"{type(error).__name__}: {error}; use a template that does"
        ) from error


def _form(tokenizer: ChatTokenizer, roles: Sequence[str], sentinels: Sequence[str]) -> _Form:
    """Return the template's text around the messages, found by rendering sentinels."""
    rendered = _render(tokenizer, roles, sentinels)
    spaced = _render(tokenizer, roles, [f"{_SPACE}{s}{_SPACE}" for s in sentinels])
    literals: list[str] = []
    rest = rendered
    for role, sentinel in zip(roles, sentinels, strict=True):
        literal, found, rest = rest.partition(sentinel)
        if not found or sentinel in rest:
            raise ConfigError(
                f"expected a chat template that shows each message once and in order, got {rendered!r} for "
                f"the roles {', '.join(roles)}, where the {role} message {sentinel!r} is missing, twice or "
                "out of order; use another template"
            )
        literals.append(literal)
    strips = tuple(f"{_SPACE}{s}{_SPACE}" not in spaced for s in sentinels)
    return _Form(literals=(*literals, rest), strips=strips)


def _suffix_form(tokenizer: ChatTokenizer, prompt: _Form) -> _Form:
    """Return the text between two assistant turns, after checking that it's the same after every turn.

    Raises:
        ConfigError: adding turns changes what came before, so a trajectory would not be one sequence.
    """
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    names = [_SYSTEM, _USER, _ACTION, _OBSERVATION, _ACTION_2, _OBSERVATION_2]
    short, long = _form(tokenizer, roles[:4], names[:4]), _form(tokenizer, roles, names)
    # History may lack the end of the generation prompt (an opened think block): in append-only mode it stays.
    before_action, after_action, last = short.literals[2:]
    opened = prompt.literals[2].removeprefix(before_action)
    extends_prompt = prompt.literals == (*short.literals[:2], before_action + opened)
    extends_turn = long.literals == (*short.literals[:4], last.removesuffix(opened), after_action, last)
    if not (extends_prompt and extends_turn):
        raise ConfigError(
            "expected a chat template whose earlier text stays the same when turns are added, got "
            f"{''.join(prompt.literals)!r} as the prompt, {''.join(short.literals)!r} one turn later and "
            f"{''.join(long.literals)!r} two turns later (messages left out); what a model samples would "
            "not be in the context it is trained in. Use a template that only appends"
        )
    return _Form(literals=short.literals[3:], strips=short.strips[3:])
