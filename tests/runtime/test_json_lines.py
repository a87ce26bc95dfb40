"""Files of JSON lines survive what a crash leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from thundersyncrl.errors import ContractError, NumericsError
from thundersyncrl.runtime.json_lines import append_line, read_lines, replace_lines


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"a": 1}, {"b": [1.5, None, "x\ny"]}, {"c": {"d": True}}]
    for row in rows:
        append_line(path, row)
    assert read_lines(path) == rows
    replace_lines(path, rows[:1])
    assert read_lines(path) == rows[:1]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("tail", [b'{"b": 2', b'{"b": "\xc3', b'{"b": 2}'])
def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    append_line(path, {"a": 1})
    path.write_bytes(path.read_bytes() + tail)
    assert read_lines(path) == [{"a": 1}]


@pytest.mark.parametrize("line", [b"{]", b"3", b"\xff"])
def test_another_line_that_is_no_object_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(ContractError, match=r"rows\.jsonl:2"):
        read_lines(path)


@pytest.mark.parametrize("row", [{"a": {"b": float("nan")}}, {"a": [0.0, float("inf")]}])
def test_numbers_that_are_not_finite_are_refused_and_leave_the_file_as_it_was(
    tmp_path: Path, row: dict[str, object]
) -> None:
    path = tmp_path / "rows.jsonl"
    append_line(path, {"a": 1})
    with pytest.raises(NumericsError, match=r"a[.\[]"):
        append_line(path, row)
    with pytest.raises(NumericsError):
        replace_lines(path, [row])
    assert read_lines(path) == [{"a": 1}]
