"""Tasks with small scripts: `fix` (until a test passes) and `repair` (what a check complains of)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from thundersyncrl.environments.shell_tasks.checks import (
    gone,
    has_line,
    has_mode,
    is_file,
    is_folder,
    prints,
)
from thundersyncrl.environments.shell_tasks.scene import Kind, Scene, Variant
from thundersyncrl.environments.shell_tasks.words import Draw, until

# fix

Numbers = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A bash script that takes whole numbers as arguments, and its faults.

    `faults` are pairs (right, wrong) of text that stands once in the script.
    """

    body: str
    faults: tuple[tuple[str, str], ...]
    output: Callable[[Numbers], object]
    num_arguments: int = 2

    def text(self, faults: Sequence[tuple[str, str]]) -> str:
        """The script with these faults in it."""
        text = f"#!/bin/bash\n{self.body}\n"
        for right, wrong in faults:
            text = text.replace(right, wrong)
        return text


ONE_LINERS: Final = (
    Program(
        body="echo $(($1 + $2))",
        faults=((" + ", " - "), (" + ", " * "), ("$1", "$2")),
        output=lambda numbers: numbers[0] + numbers[1],
    ),
    Program(
        body="echo $(($1 * $2))",
        faults=((" * ", " + "), (" * ", " - "), ("$2", "$1")),
        output=lambda numbers: numbers[0] * numbers[1],
    ),
    Program(
        body="echo $(($1 - $2))",
        faults=((" - ", " + "), ("$1", "$2")),
        output=lambda numbers: numbers[0] - numbers[1],
    ),
    Program(
        body="echo the sum of $1 and $2 is $(($1 + $2))",
        faults=(("sum", "summ"), (" + ", " - ")),
        output=lambda numbers: f"the sum of {numbers[0]} and {numbers[1]} is {sum(numbers)}",
    ),
    Program(body="echo $#", faults=(("$#", "$1"), ("$#", "$0")), output=len, num_arguments=4),
)
LOOPS: Final = (
    Program(
        body='total=0\nfor number in "$@"; do\n  total=$((total + number))\ndone\necho $total',
        faults=(("total=0", "total=1"), (" + ", " - "), ("echo $total", "echo $number")),
        output=sum,
        num_arguments=4,
    ),
    Program(
        body='best=$1\nfor number in "$@"; do\n  if [ $number -gt $best ]; then best=$number; fi\ndone\necho $best',
        faults=(("-gt", "-lt"), ("best=$number", "best=$best"), ("echo $best", "echo $number")),
        output=max,
        num_arguments=4,
    ),
    Program(
        body='best=$1\nfor number in "$@"; do\n  if [ $number -lt $best ]; then best=$number; fi\ndone\necho $best',
        faults=(("-lt", "-gt"), ("best=$number", "best=$best"), ("echo $best", "echo $number")),
        output=min,
        num_arguments=4,
    ),
    Program(
        body='count=0\nfor number in "$@"; do\n'
        "  if [ $number -gt 50 ]; then count=$((count + 1)); fi\ndone\necho $count",
        faults=(("-gt", "-lt"), ("count + 1", "count + 2"), ("count=0", "count=1")),
        output=lambda numbers: sum(number > 50 for number in numbers),
        num_arguments=4,
    ),
)


def _check_script(script: str, arguments: Numbers, output: object) -> bytes:
    call = " ".join([f"bash {script}", *map(str, arguments)])
    return (
        f"#!/bin/bash\ngot=$({call})\n"
        f'if [ "$got" = "{output}" ]; then echo passed; exit 0; fi\n'
        f'echo "{call} should print {output} but printed $got"\nexit 1\n'
    ).encode()


def _arguments(draw: Draw, program: Program, more: int) -> list[int]:
    """Arguments for which every fault shows: the first and the last are neither the largest nor the smallest.

    Args:
        more: how many more than the fewest, where the program takes any number.
    """
    small = draw.number(2, 49)
    if program.num_arguments == 2:
        return draw.rng.sample([small, draw.number(51, 98)], 2)
    first, *rest = sorted(draw.rng.sample(range(51, 99), program.num_arguments - 1 + more))
    return [first, rest[-1], small, *rest[:-1]]


def _fix(*, programs: Sequence[Program], num_faults: int, runs_check: bool) -> Variant:
    """A variant in which a script has some faults and a second script tests it."""
    phrases = (
        "{c} fails because {s} is wrong. Fix {s} until {c} passes; don't change {c}.",
        "The test {c} fails. Repair the script {s} so that it passes, and leave the test as it is.",
        "Fix the bug in {s}. You are done when bash {c} prints passed. Don't edit {c}.",
        "Something is wrong in {s}: the test {c} shows it. Correct {s}, not the test.",
    )

    def draw_scene(draw: Draw) -> Scene:
        script, check = draw.file("sh"), draw.file("sh")
        program = draw.one_of(programs)
        faults = draw.rng.sample(program.faults, num_faults)
        broken = program.text(faults)
        runs = until(
            lambda: [_arguments(draw, program, more) for more in range(4)],
            lambda runs: len({str(program.output(run)) for run in runs}) > 1,
        )
        cures = " && ".join(f"sed -i 's/{_pattern(wrong)}/{right}/' {script}" for right, wrong in faults)
        look = f"cat {script} {check}"
        return Scene(
            instruction=draw.say(phrases, s=script, c=check),
            files={script: broken.encode(), check: _check_script(script, runs[0], program.output(runs[0]))},
            changed=(script,),
            commands=(look, cures, f"bash {check}") if runs_check else (look, cures),
            checks=tuple(prints(script, [str(n) for n in run], str(program.output(run))) for run in runs),
            cheat=draw.one_of((f"echo 'echo {program.output(runs[0])}' > {script}", f"echo 'echo passed' > {check}")),
            hidden=tuple(wrong.strip() for _, wrong in faults),
        )

    return draw_scene


def _pattern(text: str) -> str:
    """A sed pattern for this very text."""
    return "".join(f"\\{letter}" if letter in "$*.[]/" else letter for letter in text)


FIX: Final[Kind] = {
    "easy": (_fix(programs=ONE_LINERS, num_faults=1, runs_check=False),),
    "medium": (_fix(programs=LOOPS, num_faults=1, runs_check=True),),
    "hard": (_fix(programs=LOOPS, num_faults=2, runs_check=True),),
}

# repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Something that a check script asks for."""

    test: str
    """Bash condition in the check script."""
    complaint: str
    cure: str
    checks: tuple[str, ...]
    name: str
    """The file or folder, known only from the complaint or the script."""
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """What is there before."""
    changed: tuple[str, ...] = ()


def _want_folder(draw: Draw) -> Want:
    name = draw.thing()
    return Want(
        test=f"[ -d {name} ]",
        complaint=draw.say(("the folder {n} is missing", "there is no folder {n}", "no directory {n}"), n=name),
        cure=f"mkdir {name}",
        checks=(is_folder(name),),
        name=name,
    )


def _want_file(draw: Draw) -> Want:
    name = draw.file()
    return Want(
        test=f"[ -f {name} ]",
        complaint=draw.say(("the file {n} is missing", "there is no file {n}", "no file {n}"), n=name),
        cure=f"touch {name}",
        checks=(is_file(name),),
        name=name,
    )


def _want_gone(draw: Draw) -> Want:
    name = draw.file()
    return Want(
        test=f"[ ! -e {name} ]",
        complaint=draw.say(("the file {n} must go", "{n} should not be here", "{n} must be deleted"), n=name),
        cure=f"rm {name}",
        checks=(gone(name),),
        name=name,
        files={name: draw.text()},
        changed=(name,),
    )


def _want_word(draw: Draw) -> Want:
    name, word = draw.file(), draw.thing()
    return Want(
        test=f"grep -q {word} {name}",
        complaint=draw.say(("{n} must have a line {w}", "a line {w} is missing in {n}"), n=name, w=word),
        cure=f"echo {word} >> {name}",
        checks=(has_line(name, word),),
        name=name,
        files={name: draw.text()},
        changed=(name,),
    )


def _want_mode(draw: Draw) -> Want:
    name, mode = draw.file(), draw.one_of((0o400, 0o600, 0o640, 0o700))
    return Want(
        test=f"[ $(stat -c %a {name}) = {mode:o} ]",
        complaint=draw.say(("{n} must have mode {m}", "the mode of {n} is not {m}"), n=name, m=f"{mode:o}"),
        cure=f"chmod {mode:o} {name}",
        checks=(has_mode(name, mode),),
        name=name,
        files={name: draw.text()},
    )


WANTS: Final = (_want_folder, _want_file, _want_gone, _want_word, _want_mode)


def _repair(*, num_wants: int, stops_at_first: bool) -> Variant:
    """A variant with a script that says what is wrong here: all at once, or one thing a time."""
    phrases = (
        "Run bash {s} and fix what it complains about.",
        "bash {s} finds something wrong here. Put it right.",
        "The check {s} fails. Do what it asks for, without changing it.",
        "Make the check {s} pass. Don't edit {s}.",
        "Find out with bash {s} what is wrong, and repair it.",
    )

    def draw_scene(draw: Draw) -> Scene:
        script = draw.file("sh")
        wants = [want(draw) for want in draw.rng.sample(WANTS, num_wants)]
        reaction = "exit 1" if stops_at_first else "failed=1"
        lines = (f'{want.test} || {{ echo "{want.complaint}"; {reaction}; }}' for want in wants)
        body = "\n".join(["#!/bin/bash", "failed=0", *lines, "[ $failed = 1 ] || echo all is well", ""])
        cures = [want.cure for want in wants] if stops_at_first else [" && ".join(want.cure for want in wants)]
        look = f"bash {script}"
        return Scene(
            instruction=draw.say(phrases, s=script),
            files={
                script: body.encode(),
                **{path: text for want in wants for path, text in want.files.items()},
            },
            changed=tuple(path for want in wants for path in want.changed),
            commands=tuple(command for cure in cures for command in (look, cure)),
            checks=tuple(check for want in wants for check in want.checks),
            cheat=f"echo 'echo all is well' > {script}",
            hidden=tuple(want.name for want in wants),
        )

    return draw_scene


REPAIR: Final[Kind] = {
    "easy": (_repair(num_wants=1, stops_at_first=True),),
    "medium": (_repair(num_wants=2, stops_at_first=False),),
    "hard": (_repair(num_wants=2, stops_at_first=True),),
}
