"""A reply is a command, the end, or malformed; what can't be read is never run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thundersyncrl.environments.command import Command, Finish, Malformed, parse_action


@pytest.mark.parametrize("language", ["bash", "sh", "shell", "", "Bash"])
def test_a_fenced_block_is_run(language: str) -> None:
    assert parse_action(f"Look.\n```{language}\nls -l\necho 'a b'\n```\n") == Command(text="ls -l\necho 'a b'")


@pytest.mark.parametrize("rest", ["\nDONE", "\n\n  DONE  \n", "\nThat was all.\nDONE<|im_end|>"])
def test_done_below_the_block_ends_with_it(rest: str) -> None:
    assert parse_action(f"```bash\ntouch a\n```{rest}") == Command(text="touch a", is_last=True)


@pytest.mark.parametrize("rest", ["\nDONE soon", "\nIt is DONE\nnot yet", ""])
def test_other_words_below_the_block_end_nothing(rest: str) -> None:
    assert parse_action(f"```bash\ntouch a\n```{rest}") == Command(text="touch a")


@pytest.mark.parametrize("reply", ["DONE", " DONE\n", "DONE<|im_end|>", "<think>\nall right\n</think>\n\nDONE"])
def test_done_alone_finishes(reply: str) -> None:
    assert parse_action(reply) == Finish()


def test_only_the_first_of_several_blocks_is_run_and_the_rest_counted() -> None:
    reply = "```bash\nls\n```\nthen\n```bash\nrm -r .\n```\nDONE"
    assert parse_action(reply) == Command(text="ls", is_last=False, num_ignored=1)


def test_a_longer_fence_may_hold_a_shorter_one() -> None:
    assert parse_action("````bash\ncat > a.md <<E\n```\nE\n````") == Command(text="cat > a.md <<E\n```\nE")


def test_a_block_in_a_thought_is_not_run() -> None:
    reply = "<think>\n```bash\nrm a\n```\n</think>\n```bash\nls\n```"
    assert parse_action(reply) == Command(text="ls")


CALL = '{"name": "bash", "arguments": {"command": "ls -l"}}'


@pytest.mark.parametrize(
    "reply",
    [
        f"<tool_call>\n{CALL}\n</tool_call>",
        f"I look.\n<tool_call>{CALL}</tool_call><|im_end|>",
        f"```json\n{CALL}\n```",
        CALL,
        '{"command": "ls -l"}',
        '{"name": "shell", "arguments": {"cmd": "ls -l"}}',
        '{"name": "bash", "arguments": "{\\"command\\": \\"ls -l\\"}"}',
    ],
)
def test_a_tool_call_is_run_in_every_spelling(reply: str) -> None:
    assert parse_action(reply) == Command(text="ls -l")


def test_a_raw_line_break_in_a_json_string_is_kept() -> None:
    assert parse_action('{"command": "cat <<E\nx\nE"}') == Command(text="cat <<E\nx\nE")


@pytest.mark.parametrize("reply", ['{"name": "done"}', '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'])
def test_a_finishing_tool_finishes(reply: str) -> None:
    assert parse_action(reply) == Finish()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ('<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "bash", "arguments": {"command": "rm -rf ', "has no end"),
        ('{"name": "bash", "arguments": {"command": "rm -rf ', "not valid JSON"),
        ("[" * 100_000, "No command"),
        ("{" + '"a":{' * 50_000, "not valid JSON"),
        ('<tool_call>["ls"]</tool_call>', "not a JSON object"),
        ('{"name": "python", "arguments": {"command": "ls"}}', "no tool 'python'"),
        ('{"name": "bash", "arguments": {"command": ["ls"]}}', "string `command`"),
        ('{"name": "bash", "arguments": {"command": "ls", "cmd": "rm a"}}', "string `command`"),
        ('{"name": "bash", "arguments": "ls"}', "string `command`"),
        ("```bash\nrm -rf build", "no closing"),
        ("```python\nprint(1)\n```", "`python`"),
        ("```bash\n\n```", "empty"),
        ("```bash\nls \0\n```", "NUL"),
        ("```bash\n" + "a" * 100_001 + "\n```", "longer than"),
        ("<think>\n```bash\nls\n```", "no end"),
        ("ls -l", "No command"),
        ("done", "No command"),
        ("", "empty"),
    ],
)
def test_what_cannot_be_read_is_malformed_and_says_what_was_expected(reply: str, reason: str) -> None:
    """Case H-06."""
    action = parse_action(reply)
    assert isinstance(action, Malformed)
    assert reason in action.reason
    assert "Expected one ```bash block" in action.reason
    assert len(action.reason) < 120


@given(st.text(max_size=200) | st.text(alphabet='`{}<>\n"bashDONE:, tool_call/', max_size=80))
def test_no_reply_raises(reply: str) -> None:
    assert isinstance(parse_action(reply), Command | Finish | Malformed)


@given(st.text(st.characters(exclude_characters="\0`", exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_json_carries_any_command_unchanged(command: str) -> None:
    action = parse_action(json.dumps({"name": "bash", "arguments": {"command": command}}))
    if command.strip():
        assert action == Command(text=command.strip("\n"))
    else:
        assert isinstance(action, Malformed)


@pytest.mark.parametrize(
    "reply",
    [
        "```bash\n" * 20_000,
        "<|a|>" * 50_000 + "x",
        " " * 200_000 + "x",
        "</tool_call>" + "<tool_call>" * 50_000,
        "```" + " " * 200_000 + "`x",
        "\n".join("`" * n + "a" for n in range(3, 600)),
    ],
    ids=["fences", "end markers", "spaces", "tool calls", "one line", "longer and longer fences"],
)
@pytest.mark.timeout(10)
def test_a_long_reply_of_nothing_but_marks_is_read_at_once(reply: str) -> None:
    assert isinstance(parse_action(reply), Malformed)
