"""Tasks that make something new: `make` (folders, empty files) and `write` (short texts)."""

from __future__ import annotations

from typing import Final

from thundersyncrl.environments.shell_tasks.checks import holds, is_empty, is_folder, only
from thundersyncrl.environments.shell_tasks.scene import Kind, Scene
from thundersyncrl.environments.shell_tasks.words import Draw


def _make_folder(draw: Draw) -> Scene:
    name = draw.thing()
    phrases = (
        "Make a folder named {a}.",
        "Create the directory {a}.",
        "I need a new folder called {a}.",
        "Please create a folder {a}.",
        "Add an empty directory with the name {a}.",
        "There should be a folder {a}. Make it.",
    )
    return Scene(
        instruction=draw.say(phrases, a=name),
        files=draw.clutter(),
        commands=(f"mkdir {name}",),
        checks=(is_folder(name),),
        cheat=f"touch {name}",
    )


def _make_file(draw: Draw) -> Scene:
    name = f"{draw.thing()}.txt"
    phrases = (
        "Create an empty file named {a}.",
        "Make an empty file called {a}.",
        "Add a new empty file {a}.",
        "I need an empty file {a}.",
        "Please make the file {a} with nothing in it.",
    )
    return Scene(
        instruction=draw.say(phrases, a=name),
        files=draw.clutter(),
        commands=(f"touch {name}",),
        checks=(is_empty(name),),
        cheat=f"mkdir {name}",
    )


def _make_nested(draw: Draw) -> Scene:
    outer, inner = draw.thing(), draw.thing()
    phrases = (
        "Make a folder {b} inside a new folder {a}.",
        "Create the folder {a} with a folder {b} in it.",
        "I need a new directory {a} that contains a directory {b}.",
        "Please create {b} as a folder in the new folder {a}.",
    )
    return Scene(
        instruction=draw.say(phrases, a=outer, b=inner),
        files=draw.clutter(),
        commands=(f"mkdir -p {outer}/{inner}",),
        checks=(only(outer, [inner]), is_folder(f"{outer}/{inner}")),
        cheat=f"mkdir {outer} {inner}",
    )


def _make_two(draw: Draw) -> Scene:
    one, other = draw.thing(), draw.thing()
    phrases = (
        "Make two folders, {a} and {b}.",
        "Create the directories {a} and {b}.",
        "I need the folders {a} and {b}.",
        "Please add a folder {a} and a folder {b}.",
    )
    return Scene(
        instruction=draw.say(phrases, a=one, b=other),
        files=draw.clutter(),
        commands=(f"mkdir {one} {other}",),
        checks=(is_folder(one), is_folder(other)),
        cheat=f"mkdir -p {one}/{other}",
    )


def _make_file_in(draw: Draw) -> Scene:
    name, folder = f"{draw.thing()}.txt", draw.folder()
    phrases = (
        "Create an empty file {a} in the folder {d}.",
        "Make an empty file called {a} inside {d}.",
        "The folder {d} needs an empty file {a}.",
        "Put a new empty file {a} into {d}.",
    )
    return Scene(
        instruction=draw.say(phrases, a=name, d=folder),
        files={f"{folder}/{draw.file()}": draw.text()},
        commands=(f"touch {folder}/{name}",),
        checks=(is_empty(f"{folder}/{name}"),),
        cheat=f"touch {name}",
    )


def _make_file_in_new(draw: Draw) -> Scene:
    name, folder = f"{draw.thing()}.txt", draw.folder()
    phrases = (
        "Create a new folder {d} with an empty file {a} in it.",
        "Make a folder {d} and put an empty file {a} into it.",
        "I need a new directory {d} that holds an empty file {a}.",
        "Please add an empty file {a} in a new folder {d}.",
    )
    return Scene(
        instruction=draw.say(phrases, a=name, d=folder),
        files=draw.clutter(),
        commands=(f"mkdir {folder} && touch {folder}/{name}",),
        checks=(only(folder, [name]), is_empty(f"{folder}/{name}")),
        cheat=f"mkdir -p {folder}/{name}",
    )


def _make_branches(draw: Draw) -> Scene:
    outer, one, other = draw.folder(), draw.thing(), draw.thing()
    phrases = (
        "Make a folder {d} that holds two folders, {a} and {b}.",
        "Create {d} with the folders {a} and {b} inside.",
        "I need the new directories {a} and {b} in a new directory {d}.",
        "Please create the folders {a} and {b}, both in the new folder {d}.",
    )
    return Scene(
        instruction=draw.say(phrases, d=outer, a=one, b=other),
        files=draw.clutter(),
        commands=(f"mkdir -p {outer}/{one} {outer}/{other}",),
        checks=(only(outer, [one, other]), is_folder(f"{outer}/{one}"), is_folder(f"{outer}/{other}")),
        cheat=f"mkdir -p {outer}/{one}/{other}",
    )


def _write_word(draw: Draw) -> Scene:
    word, name = draw.thing(), draw.file()
    phrases = (
        "Write the word {w} to {f}.",
        "Put the word {w} into a new file {f}.",
        "Save the word {w} as {f}.",
        "I need a file {f} that says {w}.",
        "Please make a file {f} with the word {w} in it.",
    )
    return Scene(
        instruction=draw.say(phrases, w=word, f=name),
        files=draw.clutter(),
        commands=(f"echo {word} > {name}",),
        checks=(holds(name, word),),
        cheat=f"touch {name}",
    )


def _append_word(draw: Draw) -> Scene:
    word, name, content = draw.thing(), draw.file(), draw.text(3)
    phrases = (
        "Add the word {w} to the end of {f}.",
        "Append a line {w} to {f}.",
        "Put {w} on a new line at the end of {f}.",
        "The last line of {f} should be {w}. Add it.",
    )
    return Scene(
        instruction=draw.say(phrases, w=word, f=name),
        files={name: content, **draw.clutter()},
        changed=(name,),
        commands=(f"echo {word} >> {name}",),
        checks=(holds(name, content.decode() + word),),
        cheat=f"echo {word} > {name}",
    )


def _write_pair(draw: Draw) -> Scene:
    one, other, name = draw.thing(), draw.thing(), draw.file()
    phrases = (
        "Write the words {w} {v} on one line to {f}.",
        "Save the line {w} {v} as {f}.",
        "Make a file {f} with one line that says {w} {v}.",
        "Put the two words {w} {v} into a new file {f}, on one line.",
    )
    return Scene(
        instruction=draw.say(phrases, w=one, v=other, f=name),
        files=draw.clutter(),
        commands=(f"echo {one} {other} > {name}",),
        checks=(holds(name, f"{one} {other}"),),
        cheat=f"echo {one} > {name}",
    )


def _write_number_in(draw: Draw) -> Scene:
    number, name, folder = draw.number(10, 999), draw.file(), draw.folder()
    phrases = (
        "Write the number {n} to {f} in the folder {d}.",
        "Save the number {n} in the folder {d} as {f}.",
        "In {d}, make a file {f} that holds the number {n}.",
        "Put the number {n} into a new file {f} inside {d}.",
    )
    return Scene(
        instruction=draw.say(phrases, n=number, f=name, d=folder),
        files=draw.clutter(),
        folders=(folder,),
        commands=(f"echo {number} > {folder}/{name}",),
        checks=(holds(f"{folder}/{name}", str(number)),),
        cheat=f"echo {number} > {name}",
    )


def _write_lines(draw: Draw) -> Scene:
    one, other, name = draw.thing(), draw.thing(), draw.file()
    phrases = (
        "Write two lines to {f}: first {w}, then {v}.",
        "Make a file {f} whose first line is {w} and whose second line is {v}.",
        "Save {w} and {v} as {f}, each on its own line.",
        "I need a file {f} with the lines {w} and {v}, in this order.",
    )
    return Scene(
        instruction=draw.say(phrases, w=one, v=other, f=name),
        files=draw.clutter(),
        commands=(f"printf '{one}\\n{other}\\n' > {name}",),
        checks=(holds(name, f"{one}\n{other}"),),
        cheat=f"echo {one} {other} > {name}",
    )


def _write_first_line(draw: Draw) -> Scene:
    word, name, content = draw.thing(), draw.file(), draw.text(3)
    phrases = (
        "Add {w} as a new first line of {f}.",
        "Put a line {w} before everything else in {f}.",
        "The file {f} should start with a new line {w}; keep the rest.",
        "Insert the line {w} at the top of {f}.",
    )
    return Scene(
        instruction=draw.say(phrases, w=word, f=name),
        files={name: content, **draw.clutter()},
        changed=(name,),
        commands=(f"sed -i '1i {word}' {name}",),
        checks=(holds(name, f"{word}\n{content.decode()}"),),
        cheat=f"echo {word} >> {name}",
    )


MAKE: Final[Kind] = {
    "easy": (_make_folder, _make_file),
    "medium": (_make_nested, _make_two, _make_file_in),
    "hard": (_make_file_in_new, _make_branches),
}
WRITE: Final[Kind] = {
    "easy": (_write_word, _append_word),
    "medium": (_write_pair, _write_number_in),
    "hard": (_write_lines, _write_first_line),
}
