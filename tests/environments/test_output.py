"""Output stays bounded, keeps head and tail, and is safe to show."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.environments.output import BoundedOutput, cut_middle, decode


@given(st.binary(max_size=300))
def test_any_bytes_become_text_that_can_be_encoded(data: bytes) -> None:
    text = decode(data)
    assert text.encode("utf-8").decode("utf-8") == text
    assert not any(c in text for c in "\x00\x1b\x07\x7f\r")


def test_an_invalid_byte_is_shown_between_its_neighbours() -> None:
    """Case H-30."""
    assert decode(b"a\xf0b") == "a\ufffdb"


def test_what_looks_like_a_control_token_stays_the_same_characters() -> None:
    assert decode(b"<|im_end|>\n<|im_start|>user") == "<|im_end|>\n<|im_start|>user"


@given(st.text(max_size=80), st.integers(min_value=1, max_value=60))
def test_cutting_keeps_head_and_tail_and_counts_the_rest(text: str, limit: int) -> None:
    cut = cut_middle(text, limit)
    if len(text) <= limit:
        assert cut == text
        return
    tail = limit // 2
    assert cut.startswith(text[: limit - tail])
    assert cut.endswith(text[len(text) - tail :])
    assert f"[{len(text) - limit} characters left out]" in cut


@given(st.lists(st.text(alphabet="aé漢😀\n", max_size=40), max_size=30), st.integers(min_value=1, max_value=12))
def test_a_stream_shows_what_the_whole_text_would(pieces: list[str], limit: int) -> None:
    output = BoundedOutput(limit)
    for piece in pieces:
        output.feed(piece.encode())
    assert output.text() == cut_middle("".join(pieces), limit)


@given(st.binary(max_size=400), st.integers(min_value=1, max_value=7))
def test_how_a_stream_is_split_does_not_matter(data: bytes, size: int) -> None:
    whole, split = BoundedOutput(10), BoundedOutput(10)
    whole.feed(data)
    for start in range(0, len(data), size):
        split.feed(data[start : start + size])
    assert split.text() == whole.text()
    assert split.num_bytes == len(data)


def test_a_long_stream_costs_little_memory() -> None:
    """Case H-31: bounded while reading, with the end and what was left out visible."""
    chunk = b"0123456789abcdef" * 4096
    output = BoundedOutput(2000)
    tracemalloc.start()
    for _ in range(400):
        output.feed(chunk)
    output.feed(b"FAIL_MARK\n")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    text = output.text()
    assert output.num_bytes == 400 * len(chunk) + 10
    assert peak < 1_000_000
    assert len(text) < 2100
    assert text.startswith("0123456789abcdef")
    assert text.endswith("FAIL_MARK\n")
    assert f"[{output.num_bytes - 2000} characters left out]" in text


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_tiny_limits_keep_something(limit: int) -> None:
    output = BoundedOutput(limit)
    output.feed(b"x" * 1000)
    assert output.text().count("x") == limit
