"""Tasks that turn the lines of one file into another: the kind `text`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from thundersyncrl.environments.shell_tasks.checks import holds
from thundersyncrl.environments.shell_tasks.scene import Kind, Scene, Variant
from thundersyncrl.environments.shell_tasks.words import PEOPLE, Draw, until

Lines = list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a transformation may depend on."""

    source: str
    target: str
    word: str
    other: str
    num: int


def _word_lines(draw: Draw) -> Lines:
    return draw.words(draw.number(6, 9))


def _repeated_lines(draw: Draw) -> Lines:
    words = draw.words(draw.number(3, 4))
    return draw.shuffled([*words, *words[:2], words[0]])


def _number_lines(draw: Draw) -> Lines:
    # Of different lengths, so that sorting them as text gives another order.
    numbers = [draw.number(2, 9), draw.number(10, 19), draw.number(100, 199), draw.number(20, 99)]
    return draw.shuffled([str(number) for number in numbers])


def _tagged_lines(word: str, draw: Draw) -> Lines:
    """Lines of which some hold the word and some don't."""
    tags = draw.shuffled([word] * draw.number(2, 3) + [draw.thing(), draw.thing()])
    return [f"{draw.rng.choice(PEOPLE)} {tag} {draw.number(10, 99)}" for tag in tags]


def _transform(
    *,
    phrases: tuple[str, ...],
    command: str,
    lines: Callable[[Draw], Lines] | None,
    result: Callable[[Lines, Arguments], Lines],
) -> Variant:
    """A variant whose oracle runs `command` and gets `result` of the lines.

    Args:
        phrases: ways to ask, with {f} the source, {g} the target, {w} and {v} words, {n} a number.
        command: the oracle, with the same names. When it doesn't name {g}, it edits the source in place.
        lines: draws the source's lines; None for lines that may hold the word {w}.
        result: the lines that are wanted.
    """
    in_place = "{g}" not in command

    def draw_scene(draw: Draw) -> Scene:
        source, target = draw.files(2, "txt")
        word, other, num = draw.thing(), draw.thing(), draw.number(2, 4)
        arguments = Arguments(source=source, target=target, word=word, other=other, num=num)

        def draw_lines() -> Lines:
            return lines(draw) if lines else _tagged_lines(word, draw)

        before = until(draw_lines, lambda candidate: result(candidate, arguments) != candidate)
        names = {"f": source, "g": target, "w": word, "v": other, "n": num}
        return Scene(
            instruction=draw.say(phrases, **names),
            files={source: "".join(f"{line}\n" for line in before).encode(), **draw.clutter()},
            changed=(source,) if in_place else (),
            commands=(command.format_map(names),),
            checks=(holds(source if in_place else target, "\n".join(result(before, arguments))),),
            cheat=f"echo {other} >> {source}" if in_place else f"cp {source} {target}",
        )

    return draw_scene


_sort = _transform(
    phrases=(
        "Sort the lines of {f} and save them as {g}.",
        "Write the lines of {f} in alphabetical order to {g}.",
        "Make {g} from {f}, with the lines sorted.",
        "Put the sorted lines of {f} into {g}.",
        "I need a sorted version of {f} in {g}.",
    ),
    command="sort {f} > {g}",
    lines=_word_lines,
    result=lambda lines, _: sorted(lines),
)
_head = _transform(
    phrases=(
        "Write the first {n} lines of {f} to {g}.",
        "Save the top {n} lines of {f} as {g}.",
        "Put only the first {n} lines of {f} into {g}.",
        "I need the first {n} lines of {f} in a file {g}.",
    ),
    command="head -n {n} {f} > {g}",
    lines=_word_lines,
    result=lambda lines, use: lines[: use.num],
)
_tail = _transform(
    phrases=(
        "Write the last {n} lines of {f} to {g}.",
        "Save the final {n} lines of {f} as {g}.",
        "Put only the last {n} lines of {f} into {g}.",
        "I need the last {n} lines of {f} in a file {g}.",
    ),
    command="tail -n {n} {f} > {g}",
    lines=_word_lines,
    result=lambda lines, use: lines[-use.num :],
)
_keep = _transform(
    phrases=(
        "Write the lines of {f} that contain {w} to {g}.",
        "Save every line of {f} with the word {w} as {g}.",
        "Find the lines with {w} in {f} and put them into {g}.",
        "I need all lines of {f} that have {w} in them, in {g}.",
    ),
    command="grep {w} {f} > {g}",
    lines=None,
    result=lambda lines, use: [line for line in lines if use.word in line],
)
_sort_backwards = _transform(
    phrases=(
        "Sort the lines of {f} from z to a and save them as {g}.",
        "Write the lines of {f} in reverse alphabetical order to {g}.",
        "Make {g} from {f}, sorted backwards.",
        "Put the lines of {f} into {g}, in falling alphabetical order.",
    ),
    command="sort -r {f} > {g}",
    lines=_word_lines,
    result=lambda lines, _: sorted(lines, reverse=True),
)
_sort_numbers = _transform(
    phrases=(
        "Sort the numbers in {f} from small to large and save them as {g}.",
        "Write the numbers of {f} to {g}, the smallest first.",
        "Put the numbers of {f} into {g} in rising order.",
        "Make {g} from {f}, with the numbers sorted by value.",
    ),
    command="sort -n {f} > {g}",
    lines=_number_lines,
    result=lambda lines, _: sorted(lines, key=int),
)
_sort_distinct = _transform(
    phrases=(
        "Sort the lines of {f} without repeats and save them as {g}.",
        "Write each different line of {f} once to {g}, sorted.",
        "Make {g} from {f}, sorted and without double lines.",
        "Put the sorted lines of {f} into {g} and drop duplicates.",
    ),
    command="sort -u {f} > {g}",
    lines=_repeated_lines,
    result=lambda lines, _: sorted(set(lines)),
)
_drop = _transform(
    phrases=(
        "Write the lines of {f} without the word {w} to {g}.",
        "Save {f} as {g}, but leave out every line with {w}.",
        "Put the lines of {f} that don't contain {w} into {g}.",
        "I need all lines of {f} except those with {w}, in {g}.",
    ),
    command="grep -v {w} {f} > {g}",
    lines=None,
    result=lambda lines, use: [line for line in lines if use.word not in line],
)
_replace = _transform(
    phrases=(
        "Replace {w} with {v} in {f}.",
        "Change every {w} in {f} to {v}.",
        "In the file {f}, write {v} wherever it says {w}.",
        "Edit {f} so that each {w} becomes {v}.",
    ),
    command="sed -i 's/{w}/{v}/g' {f}",
    lines=None,
    result=lambda lines, use: [line.replace(use.word, use.other) for line in lines],
)
_upper = _transform(
    phrases=(
        "Write {f} in capital letters to {g}.",
        "Save {f} as {g} with all letters in upper case.",
        "Put the text of {f} into {g} in upper case.",
        "Make {g} from {f}, with every letter a capital.",
    ),
    command="tr a-z A-Z < {f} > {g}",
    lines=_word_lines,
    result=lambda lines, _: [line.upper() for line in lines],
)
_keep_sorted = _transform(
    phrases=(
        "Sort those lines of {f} that contain {w} and save them as {g}.",
        "Write the lines of {f} with the word {w} to {g}, in alphabetical order.",
        "Find the lines with {w} in {f} and put them, sorted, into {g}.",
        "{g} should hold the sorted lines of {f} that have {w} in them.",
    ),
    command="grep {w} {f} | sort > {g}",
    lines=None,
    result=lambda lines, use: sorted(line for line in lines if use.word in line),
)
_first_distinct = _transform(
    phrases=(
        "Sort {f}, drop repeated lines, and save the first 2 lines as {g}.",
        "Write the first 2 of the different lines of {f}, in alphabetical order, to {g}.",
        "Put the alphabetically first 2 lines of {f} into {g}, not counting repeats.",
        "{g} should hold the first 2 lines of {f} once it is sorted without duplicates.",
    ),
    command="sort -u {f} | head -n 2 > {g}",
    lines=_repeated_lines,
    result=lambda lines, _: sorted(set(lines))[:2],
)
_backwards = _transform(
    phrases=(
        "Write the lines of {f} to {g} from the last to the first.",
        "Save {f} as {g} with the order of the lines turned around.",
        "Put the lines of {f} into {g}, the last line first.",
        "Make {g} from {f} with its lines in the opposite order.",
    ),
    command="tac {f} > {g}",
    lines=_word_lines,
    result=lambda lines, _: lines[::-1],
)
_drop_line = _transform(
    phrases=(
        "Delete line {n} of {f}.",
        "Remove line number {n} from {f} and keep the others.",
        "Line {n} of {f} is wrong. Take it out.",
        "Edit {f} so that its line {n} is gone.",
    ),
    command="sed -i '{n}d' {f}",
    lines=_word_lines,
    result=lambda lines, use: [line for number, line in enumerate(lines, start=1) if number != use.num],
)
_middle = _transform(
    phrases=(
        "Write lines 2 to 4 of {f} to {g}.",
        "Save the second, third and fourth line of {f} as {g}.",
        "Put just the lines 2, 3 and 4 of {f} into {g}.",
        "I need lines 2 through 4 of {f} in {g}.",
    ),
    command="sed -n '2,4p' {f} > {g}",
    lines=_word_lines,
    result=lambda lines, _: lines[1:4],
)
_first_words = _transform(
    phrases=(
        "Write the first word of each line of {f} to {g}.",
        "Save only the first word of every line in {f} as {g}.",
        "Each line of {f} starts with a name. Put the names into {g}, one a line.",
        "{g} should hold the first word of each line of {f}.",
    ),
    command="cut -d ' ' -f 1 {f} > {g}",
    lines=None,
    result=lambda lines, _: [line.split()[0] for line in lines],
)

TEXT: Final[Kind] = {
    "easy": (_sort, _head, _tail, _keep),
    "medium": (_sort_backwards, _sort_numbers, _sort_distinct, _drop, _replace, _upper),
    "hard": (_keep_sorted, _first_distinct, _backwards, _drop_line, _middle, _first_words),
}
