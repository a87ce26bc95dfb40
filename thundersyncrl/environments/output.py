r"""What a command printed, kept within bounds and safe to show.

Text is never interpreted: what looks like a control token of a chat template is the same characters
afterwards, and it is the renderer's duty to encode it as text.
"""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))


def decode(data: bytes) -> str:
    r"""Return bytes as text: undecodable bytes as U+FFFD, control characters other than tab and newline escaped.

    Example:
        >>> decode(b"a\xf0b\x1b[1m\r\n") == "a\ufffdb\\x1b[1m\\r\n"
        True
    """
    return _CONTROL.sub(_escaped, data.decode("utf-8", errors="replace"))


def _escaped(match: re.Match[str]) -> str:
    return repr(match.group())[1:-1]


def cut_middle(text: str, limit: int) -> str:
    """Return `text`, or its head and tail with a line between that says how many characters were left out.

    Args:
        text: what to cut.
        limit: most characters of the text that are kept.

    Example:
        >>> print(cut_middle("a" * 10 + "b" * 10, 6))
        aaa
        [14 characters left out]
        bbb
    """
    if len(text) <= limit:
        return text
    tail = limit // 2
    head = limit - tail
    return _join(text[:head], len(text) - limit, text[len(text) - tail :])


def _join(head: str, num_left_out: int, tail: str) -> str:
    before = "" if head.endswith("\n") else "\n"
    return f"{head}{before}[{num_left_out} characters left out]\n{tail}"


class BoundedOutput:
    """A stream's head and tail; memory stays bounded however much is fed.

    Args:
        limit: most characters that `text` shows.

    Example:
        >>> output = BoundedOutput(8)
        >>> for _ in range(1000):
        ...     output.feed(b"0123456789")
        >>> print(output.text())
        0123
        [9992 characters left out]
        6789
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # A character has at most four bytes and half of the limit is shown on either side; four bytes more on
        # either side keep a character that is cut in half out of sight.
        self._kept = 2 * limit + 4
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped_chars = 0
        self.num_bytes = 0
        """Bytes fed so far."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.num_bytes += len(data)
        room = self._kept - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 4 * self._kept:
            self._shrink()

    def _shrink(self) -> None:
        excess = len(self._tail) - self._kept
        if excess <= 0:
            return
        dropped = bytes(self._tail[:excess])
        # Counts characters without decoding: every character has exactly one byte that isn't a continuation
        # byte.
        self._dropped_chars += len(dropped.translate(None, _CONTINUATION_BYTES))
        del self._tail[:excess]

    @property
    def num_bytes_dropped(self) -> int:
        """Bytes that are no longer in memory."""
        return self.num_bytes - len(self._head) - len(self._tail)

    def text(self) -> str:
        """Return what was fed, decoded, cut in the middle past the limit."""
        self._shrink()
        if self.num_bytes_dropped == 0:
            return cut_middle(decode(bytes(self._head + self._tail)), self._limit)
        head = decode(bytes(self._head))
        # What the tail holds of a character whose first byte was dropped has been counted with that byte.
        tail = decode(bytes(self._tail.lstrip(_CONTINUATION_BYTES)))
        num_tail = self._limit // 2
        num_head = self._limit - num_tail
        left_out = self._dropped_chars + max(0, len(head) - num_head) + max(0, len(tail) - num_tail)
        return _join(head[:num_head], left_out, tail[len(tail) - min(num_tail, len(tail)) :])
