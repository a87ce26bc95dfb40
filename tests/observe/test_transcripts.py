"""The transcripts file: a trajectory's text, and on request exactly its tokens."""

from __future__ import annotations

from pathlib import Path

from tests.observe.records import make_trajectory
from thundersyncrl.observe.transcripts import TranscriptsFile, transcript
from thundersyncrl.runtime.json_lines import read_lines


def test_a_trajectory_is_one_line_with_its_chat_and_outcome(tmp_path: Path) -> None:
    path = tmp_path / "transcripts.jsonl"
    file = TranscriptsFile(path)
    file.sample(make_trajectory(step=3, member=2, text="printf 'a\nb'"), 1.0)
    file.sample(make_trajectory(step=3, member=3), None)
    first, second = read_lines(path)
    assert (first["step"], first["member"], first["task"], first["reward"]) == (3, 2, "copy-1", 1.0)
    assert first["messages"][-1] == {"role": "assistant", "content": "printf 'a\nb'"}
    assert first["status"] == "completed"
    assert "turns" not in first
    assert second["reward"] is None


def test_text_that_is_no_unicode_survives(tmp_path: Path) -> None:
    path = tmp_path / "transcripts.jsonl"
    TranscriptsFile(path).sample(make_trajectory(text="a\udcffb\u2028c\x00"), 0.0)
    assert read_lines(path)[0]["messages"][-1]["content"] == "a\udcffb\u2028c\x00"


def test_tokens_and_logprobs_are_written_exactly(tmp_path: Path) -> None:
    path = tmp_path / "transcripts.jsonl"
    trajectory = make_trajectory(num_turns=2)
    TranscriptsFile(path, with_tokens=True).sample(trajectory, 0.1)
    row = read_lines(path)[0]
    assert row == transcript(trajectory, 0.1, with_tokens=True)
    assert (
        row["turns"]
        == [{"observation_ids": [1, 2], "action_ids": [3], "behavior_logprobs": [-0.5], "finish": "stop"}] * 2
    )
