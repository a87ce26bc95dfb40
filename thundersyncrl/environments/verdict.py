"""Read the reward that a verifier left, trusting nothing about the file.

`reward.txt` holds one number. `reward.json` holds one number, or an object of named numbers: the value is the
one named "reward", else the mean of all; every name is kept as a component. Both files must agree.

A verifier that runs the agent's own program gives it the rights to write here too. Such a verifier writes its
reward last, and what would keep it from doing so (a read-only file or folder, a second file) is refused here.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import cast

from thundersyncrl.errors import VerifierError
from thundersyncrl.records import Reward

REWARD_TEXT = "reward.txt"
REWARD_JSON = "reward.json"
MAX_REWARD_BYTES = 1 << 16
MAX_REWARD = 1e9
"""Larger ones are a mistake, and their squares overflow in the learner's float32."""


def read_reward(folder: Path) -> Reward:
    """Return the reward in a folder of ours that only the verifier could write to.

    Raises:
        VerifierError: no file; a link or anything else than a plain file; not a finite number.
    """
    if folder.stat().st_mode & stat.S_IRWXU != stat.S_IRWXU:
        raise VerifierError("expected /logs/verifier to stay writable, got another mode; no verdict")
    found = [
        parse(content)
        for name, parse in ((REWARD_TEXT, parse_text), (REWARD_JSON, parse_json))
        if (content := _read_plain(folder, name)) is not None
    ]
    if not found:
        raise VerifierError(
            f"expected the verifier to write /logs/verifier/{REWARD_TEXT} or {REWARD_JSON}, got neither; no verdict"
        )
    if found[0].value != found[-1].value:
        raise VerifierError(
            f"expected one verdict, got {found[0].value:g} in {REWARD_TEXT} and {found[-1].value:g} in {REWARD_JSON}; "
            "no verdict"
        )
    return found[-1]


def _read_plain(folder: Path, name: str) -> str | None:
    """Return a file's text, None when there is nothing of that name. Links are never followed."""
    shown = f"/logs/verifier/{name}"
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise VerifierError(
            f"expected {shown} to be a plain writable file, got {error.strerror}; no verdict"
        ) from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) or not mode & stat.S_IWUSR:
            got = "a read-only one" if stat.S_ISREG(mode) else "something else"
            raise VerifierError(f"expected {shown} to be a plain writable file, got {got}; no verdict")
        content = os.read(fd, MAX_REWARD_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > MAX_REWARD_BYTES:
        raise VerifierError(f"expected {shown} of at most {MAX_REWARD_BYTES} bytes, got more; no verdict")
    return content.decode("utf-8", errors="replace")


def parse_text(text: str) -> Reward:
    """Return the reward of a reward.txt.

    Raises:
        VerifierError: not one finite number.

    Example:
        >>> parse_text(" 0.5\\n").value
        0.5
    """
    try:
        value = float(text.strip()) if "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not abs(value) <= MAX_REWARD:
        raise VerifierError(
            f"expected one finite number of at most {MAX_REWARD:g} in {REWARD_TEXT}, got {text[:80]!r}; no verdict"
        )
    return Reward(value=value)


def parse_json(text: str) -> Reward:
    """Return the reward of a reward.json.

    Raises:
        VerifierError: neither a finite number nor an object of finite numbers.

    Example:
        >>> parse_json('{"speed": 0.5, "style": 1}')
        Reward(value=0.75, components={'speed': 0.5, 'style': 1.0})
        >>> parse_json('{"reward": 1, "style": 0}').value
        1.0
    """
    try:
        data: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"expected JSON in {REWARD_JSON}, got {text[:80]!r} ({error}); no verdict") from error
    if not isinstance(data, dict):
        return Reward(value=_number(data, "the reward"))
    named = {name: _number(value, f"`{name[:40]}`") for name, value in cast(dict[str, object], data).items()}
    if not named:
        raise VerifierError(f"expected at least one named reward in {REWARD_JSON}, got none; no verdict")
    value = named["reward"] if "reward" in named else sum(named.values()) / len(named)
    return Reward(value=value, components=named)


def _number(value: object, what: str) -> float:
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_REWARD:
        number = float(value)
    if not math.isfinite(number):
        raise VerifierError(
            f"expected {what} in {REWARD_JSON} to be a finite number of at most {MAX_REWARD:g}, got "
            f"{repr(value)[:80]}; no verdict"
        )
    return number
