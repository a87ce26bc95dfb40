"""Bash conditions on the working folder, and the verifier script that evaluates them once the agent has left.

A condition is bash that succeeds or fails. It calls the functions below, which find their tools only on the
system's own path, follow no link that was put in a file's place, and run nothing that the agent wrote (except
`prints`, after which every process that a script left behind is killed, before the reward is written).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Final

MAX_BYTES: Final = 100_000
"""Files of this size or more aren't read; no task needs one."""

FUNCTIONS: Final[Mapping[str, str]] = {
    # `read` succeeds when it meets a zero byte or the limit, which no right answer has.
    "read_text": f"""read_text() {{
  got=
  [ -f "$1" ] && [ ! -L "$1" ] && [ -r "$1" ] || return 1
  IFS= read -rd '' -n {MAX_BYTES} got < "$1" && return 1
  while [ "$got" != "${{got%$'\\n'}}" ]; do got=${{got%$'\\n'}}; done
}}""",
    "holds": """holds() { read_text "$1" && [ "$got" = "$2" ]; }""",
    "answers": """answers() {
  read_text "$1" || return 1
  got=${got#"${got%%[![:space:]]*}"}
  got=${got%"${got##*[![:space:]]}"}
  got=${got%.}
  [ "${got,,}" = "${2,,}" ]
}""",
    "lists": """lists() {
  read_text "$1" || return 1
  [ "$(while read -r line; do [ -z "$line" ] || echo "${line##*/}"; done <<< "$got" | sort)" = "$2" ]
}""",
    "has_line": """has_line() { read_text "$1" && [[ $'\\n'$got$'\\n' = *$'\\n'"$2"$'\\n'* ]]; }""",
    "is_file": """is_file() { [ -f "$1" ] && [ ! -L "$1" ]; }""",
    "is_empty": """is_empty() { [ -f "$1" ] && [ ! -L "$1" ] && [ ! -s "$1" ]; }""",
    "is_folder": """is_folder() { [ -d "$1" ] && [ ! -L "$1" ]; }""",
    "gone": """gone() { [ ! -e "$1" ] && [ ! -L "$1" ]; }""",
    "apart": """apart() { [ ! "$1" -ef "$2" ]; }""",
    "only": """only() {
  is_folder "$1" || return 1
  local folder=$1 entry names=()
  shift
  for entry in "$folder"/*; do names+=("${entry##*/}"); done
  [ "${names[*]}" = "$*" ]
}""",
    "has_mode": """has_mode() { [ ! -L "$1" ] && [ "$(stat -c %a -- "$1")" = "$2" ]; }""",
    "runnable": """runnable() {
  [ -f "$1" ] && [ ! -L "$1" ] && [[ $(stat -c %a -- "$1") =~ ^7[0145][0145]$ ]]
}""",
    "unzips": """unzips() {
  [ -f "$1" ] && [ "$(gzip -dc < "$1" 2> /dev/null | head -c 100000)" = "$2" ]
}""",
    "packs": """packs() {
  local archive=$1 member
  [ -f "$archive" ] && [ ! -L "$archive" ] || return 1
  for member in "$2" "./$2"; do
    [ "$(tar -xOf "$archive" -- "$member" 2> /dev/null | head -c 100000)" = "$3" ] && return
  done
  return 1
}""",
    "packs_only": """packs_only() {
  local archive=$1 member names=()
  [ -f "$archive" ] && [ ! -L "$archive" ] || return 1
  shift
  while read -r member; do
    member=${member#./}
    [ -z "$member" ] || [ "${member%/}" != "$member" ] || names+=("$member")
  done <<< "$(tar -tf "$archive" 2> /dev/null | sort)"
  [ "${names[*]}" = "$*" ]
}""",
    "is_json": """is_json() {
  read_text "$1" || return 1
  local wanted=${2//[[:space:]]/} same='import json, sys
one, other = (json.dumps(json.loads(text), sort_keys=True) for text in sys.argv[1:])
sys.exit(one != other)'
  [ "${got//[[:space:]]/}" = "$wanted" ] || python3 -I -S -c "$same" "$got" "$wanted" 2> /dev/null
}""",
    "prints": """prints() {
  local expected=$1 output=/logs/verifier/printed.txt
  shift
  (ulimit -f 1000 && timeout -k 1 5 env -i PATH="$PATH" /bin/bash "$@") < /dev/null > "$output" 2> /dev/null
  [ "$(head -c 10000 "$output")" = "$expected" ]
}""",
    "git_says": """git_says() {
  local expected=$1
  shift
  [ "$(git -c safe.directory='*' -c core.fsmonitor=false -C /app "$@" 2> /dev/null)" = "$expected" ]
}""",
}

CLEAN_UP: Final = """for process in /proc/[0-9]*; do
  [ "${process#/proc/}" -le $$ ] || kill -9 "${process#/proc/}" 2> /dev/null
done
rm -rf /logs/verifier/*
"""
"""What scripts under test left behind: processes, and files that may fill the disk."""


def verifier(conditions: Sequence[str]) -> str:
    """The text of a `tests/test.sh` that writes 1 when all conditions hold, else 0."""
    functions = "\n".join(FUNCTIONS[name] for name in FUNCTIONS if name in _functions_of(conditions))
    passed = " &&\n  ".join(conditions)
    clean_up = CLEAN_UP if "prints()" in functions else ""
    return f"""#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C
shopt -s dotglob nullglob
{functions}
passed() {{
  {passed}
}}
mkdir -p /logs/verifier
reward=0
cd /app && passed && reward=1
{clean_up}rm -f /logs/verifier/reward.txt
echo "$reward" > /logs/verifier/reward.txt
"""


def _functions_of(conditions: Sequence[str]) -> set[str]:
    """The functions that the conditions call, and those that these call."""
    needed: set[str] = set()
    new = {condition.split()[0] for condition in conditions} & FUNCTIONS.keys()
    while new:
        needed |= new
        calls = {word for name in new for word in re.findall(r"\w+", FUNCTIONS[name])}
        new = (calls & FUNCTIONS.keys()) - needed
    return needed


def _call(function: str, *arguments: str) -> str:
    return " ".join([function, *(quote(argument) for argument in arguments)])


def holds(path: str, content: bytes | str) -> str:
    """The file has this text (newlines at its end don't count).

    Example:
        >>> holds("a.txt", "red fox\\n")
        "holds a.txt 'red fox'"
    """
    text = content.decode() if isinstance(content, bytes) else content
    return _call("holds", path, text.rstrip("\n"))


def answers(path: str, answer: str | int) -> str:
    """The file holds just this word or number; case and white space around it don't count."""
    return _call("answers", path, str(answer))


def lists(path: str, names: Sequence[str]) -> str:
    """The file holds these names, one a line, in any order, with or without their folders."""
    return _call("lists", path, "\n".join(sorted(names)))


def has_line(path: str, line: str) -> str:
    """One of the file's lines is this."""
    return _call("has_line", path, line)


def is_file(path: str) -> str:
    """It is a file, whatever it holds."""
    return _call("is_file", path)


def is_empty(path: str) -> str:
    """It is a file of no bytes."""
    return _call("is_empty", path)


def is_folder(path: str) -> str:
    """It is a folder."""
    return _call("is_folder", path)


def gone(path: str) -> str:
    """Nothing is there."""
    return _call("gone", path)


def apart(path: str, other: str) -> str:
    """The two aren't the same file under two names."""
    return _call("apart", path, other)


def only(folder: str, names: Sequence[str]) -> str:
    """The folder holds just these names."""
    return _call("only", folder, *sorted(names))


def has_mode(path: str, mode: int) -> str:
    """The permissions are these, such as 0o640."""
    return _call("has_mode", path, f"{mode:o}")


def runnable(path: str) -> str:
    """The owner may do everything, and nobody else may write."""
    return _call("runnable", path)


def unzips(path: str, content: bytes) -> str:
    """The gzip file holds this text."""
    return _call("unzips", path, content.decode().rstrip("\n"))


def packs(archive: str, member: str, content: bytes) -> str:
    """The tar file, compressed or not, holds this member with this text."""
    return _call("packs", archive, member, content.decode().rstrip("\n"))


def packs_only(archive: str, members: Sequence[str]) -> str:
    """The tar file holds just these files; folders don't count."""
    return _call("packs_only", archive, *sorted(members))


def is_json(path: str, text: str) -> str:
    """The file holds this JSON value, however it is laid out."""
    return _call("is_json", path, text)


def prints(script: str, arguments: Sequence[str], output: str) -> str:
    """The script, run with these arguments, prints this."""
    return _call("prints", output, script, *arguments)


def git_says(output: str, *arguments: str) -> str:
    """A git command that only reads prints this."""
    return _call("git_says", output, *arguments)
