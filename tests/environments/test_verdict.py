"""A verdict is a finite number in a plain file; anything else is no verdict, never 0."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.environments.verdict import MAX_REWARD, parse_json, parse_text, read_reward
from thundersyncrl.errors import VerifierError
from thundersyncrl.records import Reward


@given(st.floats(min_value=-MAX_REWARD, max_value=MAX_REWARD))
def test_any_number_that_the_learner_can_square_is_a_reward(value: float) -> None:
    assert parse_text(f"{value!r}\n").value == value


@pytest.mark.parametrize(
    "text", ["", " \n", "nan", "inf", "-Infinity", "1e999", "1e10", "pass", "1 0", "1,5", "1_0", "\ufffd", "0x1"]
)
def test_a_text_that_is_no_finite_number_is_no_verdict(text: str) -> None:
    with pytest.raises(VerifierError, match=r"finite number.*no verdict"):
        parse_text(text)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("1", Reward(value=1.0)),
        ('{"reward": 0.25}', Reward(value=0.25, components={"reward": 0.25})),
        ('{"reward": 1, "style": 0}', Reward(value=1.0, components={"reward": 1.0, "style": 0.0})),
        ('{"tests": 1, "style": 0.5}', Reward(value=0.75, components={"tests": 1.0, "style": 0.5})),
    ],
)
def test_named_rewards_become_one_value_and_components(text: str, reward: Reward) -> None:
    assert parse_json(text) == reward


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{}", "[]", "null", "true", '"1"', "NaN", '{"reward": NaN}', '{"reward": true}', '{"reward": "1"}',
        '{"reward": null}', '{"a": {"b": 1}}', '{"a": 1, "b": Infinity}', "-1e10",
        "1" + "0" * 400, "[" * 100_000, "9" * 5000,
    ],
)  # fmt: skip
def test_json_that_is_no_finite_number_is_no_verdict(text: str) -> None:
    with pytest.raises(VerifierError, match="no verdict"):
        parse_json(text)


def test_two_files_must_agree(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text('{"tests": 1, "style": 0}')
    (tmp_path / "reward.txt").write_text("0.5\n")
    assert read_reward(tmp_path) == Reward(value=0.5, components={"tests": 1.0, "style": 0.0})
    (tmp_path / "reward.txt").write_text("1\n")
    with pytest.raises(VerifierError, match=r"got 1 in reward\.txt and 0\.5 in reward\.json"):
        read_reward(tmp_path)


def test_what_keeps_a_verifier_from_writing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("1\n")
    (tmp_path / "reward.txt").chmod(0o444)
    with pytest.raises(VerifierError, match="read-only"):
        read_reward(tmp_path)
    (tmp_path / "reward.txt").chmod(0o644)
    tmp_path.chmod(0o555)
    with pytest.raises(VerifierError, match="stay writable"):
        read_reward(tmp_path)
    tmp_path.chmod(0o755)
    assert read_reward(tmp_path) == Reward(value=1.0)


def test_no_file_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match="got neither"):
        read_reward(tmp_path)


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "pipe", "huge"])
def test_only_a_small_plain_file_is_read(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "reward.txt"
    (tmp_path / "elsewhere").write_text("1")
    match kind:
        case "link":
            file.symlink_to(tmp_path / "elsewhere")
        case "dangling link":
            file.symlink_to("/no/such/file")
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case _:
            file.write_text("1" + " " * 100_000)
    with pytest.raises(VerifierError, match=r"plain writable file|at most"):
        read_reward(tmp_path)
