"""Tasks that end in a number or a name: the kinds `count` and `search`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from thundersyncrl.environments.shell_tasks.checks import answers, gone, holds, lists, only
from thundersyncrl.environments.shell_tasks.scene import Kind, Scene, Variant
from thundersyncrl.environments.shell_tasks.words import PEOPLE, Draw, until

# count


def _count_lines_with(*, phrases: tuple[str, ...], command: str, count: Callable[[list[str], str], int]) -> Variant:
    """A variant that counts something in the lines of {f}, maybe with the word {w}, and writes it to {g}."""

    def draw_scene(draw: Draw) -> Scene:
        source, target, word, other = draw.file(), draw.file("txt"), draw.thing(), draw.thing()

        def draw_lines() -> list[str]:
            tags = draw.shuffled([word] * draw.number(2, 9) + [other] * draw.number(2, 9))
            return [" ".join([draw.one_of(PEOPLE), tag, word][: draw.number(2, 3)]) for tag in tags]

        # Neither a number that is quickly guessed nor, unless asked for, the plain number of lines.
        lines = until(
            draw_lines,
            lambda lines: count(lines, word) > 1 and ("wc -l <" in command or count(lines, word) != len(lines)),
        )
        names = {"f": source, "g": target, "w": word}
        return Scene(
            instruction=draw.say(phrases, **names),
            files={source: "".join(f"{line}\n" for line in lines).encode(), **draw.clutter()},
            commands=(command.format_map(names),),
            checks=(answers(target, count(lines, word)),),
            cheat=f"echo 1 > {target}",
        )

    return draw_scene


def _count_files_in(*, phrases: tuple[str, ...], command: str, count: Callable[[list[str]], int]) -> Variant:
    """A variant that counts something among the files of the folder {d} and writes it to {g}."""

    def draw_scene(draw: Draw) -> Scene:
        folder, inner, target = draw.folder(), draw.folder(), draw.file("txt")
        texts, logs = draw.files(draw.number(2, 7), "txt"), draw.files(draw.number(1, 7), "log")
        paths = [*texts, *logs]
        if "-type" in command:
            paths += [f"{inner}/{name}" for name in draw.files(draw.number(2, 4), "txt")]
        names = {"d": folder, "g": target}
        return Scene(
            instruction=draw.say(phrases, **names),
            files={f"{folder}/{path}": draw.text() for path in paths},
            commands=(command.format_map(names),),
            checks=(answers(target, count(paths)),),
            cheat=f"echo 1 > {target}",
        )

    return draw_scene


_lines = _count_lines_with(
    phrases=(
        "Count the lines in {f} and write the number to {g}.",
        "How many lines does {f} have? Save the number as {g}.",
        "Write the number of lines of {f} to {g}.",
        "Put the line count of {f} into {g}, just the number.",
    ),
    command="wc -l < {f} > {g}",
    count=lambda lines, _: len(lines),
)
_matches = _count_lines_with(
    phrases=(
        "Count the lines with {w} in {f} and write the number to {g}.",
        "How many lines of {f} contain {w}? Save the number as {g}.",
        "Write to {g} how many lines of {f} have the word {w}.",
        "Put the number of lines in {f} that contain {w} into {g}.",
    ),
    command="grep -c {w} {f} > {g}",
    count=lambda lines, word: sum(word in line for line in lines),
)
_files = _count_files_in(
    phrases=(
        "Count the files in {d} and write the number to {g}.",
        "How many files are in {d}? Save the number as {g}.",
        "Write the number of files in the folder {d} to {g}.",
        "Put the file count of {d} into {g}.",
    ),
    command="ls {d} | wc -l > {g}",
    count=len,
)
_words = _count_lines_with(
    phrases=(
        "Count the words in {f} and write the number to {g}.",
        "How many words does {f} have? Save the number as {g}.",
        "Write the number of words of {f} to {g}.",
        "Put the word count of {f} into {g}, just the number.",
    ),
    command="wc -w < {f} > {g}",
    count=lambda lines, _: len(" ".join(lines).split()),
)
_misses = _count_lines_with(
    phrases=(
        "Count the lines without {w} in {f} and write the number to {g}.",
        "How many lines of {f} don't contain {w}? Save the number as {g}.",
        "Write to {g} how many lines of {f} lack the word {w}.",
        "Put the number of lines in {f} that don't have {w} into {g}.",
    ),
    command="grep -vc {w} {f} > {g}",
    count=lambda lines, word: sum(word not in line for line in lines),
)
_texts = _count_files_in(
    phrases=(
        "Count the .txt files in {d} and write the number to {g}.",
        "How many files in {d} end in .txt? Save the number as {g}.",
        "Write the number of .txt files in the folder {d} to {g}.",
        "Put the number of files in {d} that end in .txt into {g}.",
    ),
    command="ls {d}/*.txt | wc -l > {g}",
    count=lambda paths: sum(path.endswith(".txt") for path in paths),
)
_distinct = _count_lines_with(
    phrases=(
        "How many different lines does {f} have? Write the number to {g}.",
        "Count the lines of {f}, repeated ones only once, and save the number as {g}.",
        "Write to {g} how many distinct lines are in {f}.",
        "Put the number of different lines of {f} into {g}.",
    ),
    command="sort -u {f} | wc -l > {g}",
    count=lambda lines, _: len(set(lines)),
)
_occurrences = _count_lines_with(
    phrases=(
        "How often does {w} occur in {f}? Some lines have it twice. Write the number to {g}.",
        "Count every {w} in {f}, also when a line has two, and save the number as {g}.",
        "Write to {g} how many times the word {w} stands in {f}; it can be twice in a line.",
        "Put the number of times that {w} occurs in {f} into {g}, not the number of lines.",
    ),
    command="grep -o {w} {f} | wc -l > {g}",
    count=lambda lines, word: " ".join(lines).split().count(word),
)
_tree = _count_files_in(
    phrases=(
        "Count the files in {d} and in its subfolders and write the number to {g}.",
        "How many files are in {d}, with all folders in it? Save the number as {g}.",
        "Write the number of files anywhere under {d} to {g}; folders don't count.",
        "Put the number of files in the whole tree {d} into {g}.",
    ),
    command="find {d} -type f | wc -l > {g}",
    count=len,
)

# search


def _haystack(draw: Draw, folder: str, num: int) -> tuple[list[str], str, dict[str, bytes]]:
    """Files of a folder, and a word that stands in the first `num` of them."""
    word, other = draw.thing(), draw.thing()
    names = draw.files(draw.number(num + 2, num + 4), "txt")

    def content(tag: str) -> bytes:
        return draw.text() + f"{draw.one_of(PEOPLE)} {tag} {draw.number(10, 99)}\n".encode() + draw.text()

    files = {f"{folder}/{name}": content(word if name in names[:num] else other) for name in names}
    return names[:num], word, files


def _search_one(draw: Draw) -> Scene:
    folder, target = draw.folder(), draw.file("txt")
    found, word, files = _haystack(draw, folder, 1)
    phrases = (
        "Which file in {d} contains {w}? Write its name to {g}.",
        "Find the file in {d} with the word {w} and save its name as {g}.",
        "One file in {d} mentions {w}. Write its name to {g}.",
        "Write to {g} which file of the folder {d} has the word {w} in it.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder, w=word, g=target),
        files=files,
        commands=(f"grep -l {word} {folder}/* > {target}",),
        checks=(lists(target, found),),
        cheat=f"ls {folder} > {target}",
    )


def _search_all(draw: Draw) -> Scene:
    folder, target = draw.folder(), draw.file("txt")
    found, word, files = _haystack(draw, folder, draw.number(2, 3))
    phrases = (
        "Write the names of all files in {d} that contain {w} to {g}, one a line.",
        "Which files in {d} contain {w}? Save their names as {g}, one on each line.",
        "List the files of {d} with the word {w} in {g}.",
        "Several files in {d} mention {w}. Put their names into {g}, one a line.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder, w=word, g=target),
        files=files,
        commands=(f"grep -l {word} {folder}/* > {target}",),
        checks=(lists(target, found),),
        cheat=f"ls {folder} > {target}",
    )


def _search_and_move(draw: Draw) -> Scene:
    folder, target = draw.folder(), draw.folder()
    (found,), word, files = _haystack(draw, folder, 1)
    phrases = (
        "Move the file in {d} that contains {w} to {e}.",
        "One file in {d} has the word {w} in it. Move it into {e}.",
        "Find the file with {w} in {d} and put it into the folder {e}.",
        "The file of {d} that mentions {w} belongs in {e}. Move it.",
    )
    path = f"{folder}/{found}"
    return Scene(
        instruction=draw.say(phrases, d=folder, w=word, e=target),
        files=files,
        folders=(target,),
        changed=(path,),
        commands=(f"mv $(grep -l {word} {folder}/*) {target}/",),
        checks=(gone(path), only(target, [found]), holds(f"{target}/{found}", files[path])),
        cheat=f"mv {folder}/* {target}/",
    )


def _search_by_name(draw: Draw) -> Scene:
    outer, middle, target = draw.folder(), draw.folder(), draw.folder()
    name, content = draw.file(), draw.text()
    path = f"{outer}/{middle}/{draw.one_of(['', f'{draw.thing()}/'])}{name}"
    phrases = (
        "Somewhere under {d} is a file {f}. Move it to {e}.",
        "Find {f}, which is in a subfolder of {d}, and put it into {e}.",
        "The file {f} lies deep in the folder {d}. Move it to the folder {e}.",
        "Look for {f} in {d} and all folders in it, and move it into {e}.",
    )
    return Scene(
        instruction=draw.say(phrases, d=outer, f=name, e=target),
        files={path: content, f"{outer}/{draw.file()}": draw.text()},
        folders=(target, f"{outer}/{draw.thing()}"),
        changed=(path,),
        commands=(f"mv $(find {outer} -name {name}) {target}/",),
        checks=(gone(path), only(target, [name]), holds(f"{target}/{name}", content)),
        cheat=f"touch {target}/{name}",
    )


def _search_largest(draw: Draw) -> Scene:
    folder, target = draw.folder(), draw.file("txt")
    names = draw.files(draw.number(4, 6), "txt")
    sizes = draw.shuffled([number * number for number in range(1, len(names) + 1)])
    phrases = (
        "Which file in {d} is the largest? Write its name to {g}.",
        "Find the biggest file in {d} and save its name as {g}.",
        "Write the name of the file in {d} with the most bytes to {g}.",
        "One file in {d} is larger than the others. Put its name into {g}.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder, g=target),
        files={f"{folder}/{name}": draw.text(size) for name, size in zip(names, sizes, strict=True)},
        commands=(f"ls -S {folder} | head -n 1 > {target}",),
        checks=(lists(target, [names[sizes.index(max(sizes))]]),),
        cheat=f"ls {folder} > {target}",
    )


COUNT: Final[Kind] = {
    "easy": (_lines, _matches, _files),
    "medium": (_words, _misses, _texts),
    "hard": (_distinct, _occurrences, _tree),
}
SEARCH: Final[Kind] = {
    "easy": (_search_one,),
    "medium": (_search_all, _search_and_move),
    "hard": (_search_by_name, _search_largest),
}
