"""Tasks that move or rename what is there: the kind `move`."""

from __future__ import annotations

from typing import Final

from thundersyncrl.environments.shell_tasks.checks import gone, holds, only
from thundersyncrl.environments.shell_tasks.scene import Kind, Scene
from thundersyncrl.environments.shell_tasks.words import Draw


def _move_into(draw: Draw) -> Scene:
    name, folder, content = draw.file(), draw.folder(), draw.text()
    phrases = (
        "Move {f} into the folder {d}.",
        "Put the file {f} into {d}.",
        "{f} belongs in the folder {d}. Move it there.",
        "Please move the file {f} to {d}.",
        "Take {f} and move it into {d}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=name, d=folder),
        files={name: content, **draw.clutter()},
        folders=(folder,),
        changed=(name,),
        commands=(f"mv {name} {folder}/",),
        checks=(gone(name), holds(f"{folder}/{name}", content)),
        cheat=f"rm {name}; touch {folder}/{name}",
    )


def _rename(draw: Draw) -> Scene:
    old, new, content = draw.file(), draw.file(), draw.text()
    phrases = (
        "Rename {f} to {g}.",
        "Change the name of {f} to {g}.",
        "Give the file {f} the new name {g}.",
        "{f} should be called {g}. Rename it.",
        "Please rename the file {f} as {g}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=old, g=new),
        files={old: content, **draw.clutter()},
        changed=(old,),
        commands=(f"mv {old} {new}",),
        checks=(gone(old), holds(new, content)),
        cheat=f"rm {old}; touch {new}",
    )


def _move_and_rename(draw: Draw) -> Scene:
    old, new, folder, content = draw.file(), draw.file(), draw.folder(), draw.text()
    phrases = (
        "Move {f} into {d} and call it {g} there.",
        "Put {f} into the folder {d} under the new name {g}.",
        "Move {f} to {d} and rename it to {g}.",
        "The file {f} should become {g} in the folder {d}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=old, g=new, d=folder),
        files={old: content, **draw.clutter()},
        folders=(folder,),
        changed=(old,),
        commands=(f"mv {old} {folder}/{new}",),
        checks=(gone(old), only(folder, [new]), holds(f"{folder}/{new}", content)),
        cheat=f"mv {old} {folder}/",
    )


def _move_two(draw: Draw) -> Scene:
    one, other, folder = draw.file(), draw.file(), draw.folder()
    contents = draw.text(), draw.text()
    phrases = (
        "Move {f} and {g} into {d}.",
        "Put the files {f} and {g} into the folder {d}.",
        "Both {f} and {g} belong in {d}. Move them.",
        "Please move {f} and {g} to the folder {d}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=one, g=other, d=folder),
        files={one: contents[0], other: contents[1], **draw.clutter()},
        folders=(folder,),
        changed=(one, other),
        commands=(f"mv {one} {other} {folder}/",),
        checks=(
            gone(one),
            gone(other),
            holds(f"{folder}/{one}", contents[0]),
            holds(f"{folder}/{other}", contents[1]),
        ),
        cheat=f"mv {one} {folder}/",
    )


def _move_between(draw: Draw) -> Scene:
    name, source, target, content = draw.file(), draw.folder(), draw.folder(), draw.text()
    phrases = (
        "Move {f} from {d} to {e}.",
        "Take {f} out of {d} and put it into {e}.",
        "The file {f} in {d} belongs in {e}. Move it.",
        "Please move {f} from the folder {d} into the folder {e}.",
    )
    stays = f"{source}/{draw.file()}"
    return Scene(
        instruction=draw.say(phrases, f=name, d=source, e=target),
        files={f"{source}/{name}": content, stays: draw.text()},
        folders=(target,),
        changed=(f"{source}/{name}",),
        commands=(f"mv {source}/{name} {target}/",),
        checks=(gone(f"{source}/{name}"), holds(f"{target}/{name}", content)),
        cheat=f"mv {source}/* {target}/; rm {target}/{name}; touch {target}/{name}",
    )


def _move_by_ending(draw: Draw) -> Scene:
    folder = draw.folder()
    moved = {name: draw.text() for name in draw.files(draw.number(2, 3), "log")}
    stays = {name: draw.text() for name in draw.files(2, "txt")}
    phrases = (
        "Move all files that end in .log into {d}.",
        "Put every .log file into the folder {d}.",
        "Please move the .log files to {d} and leave the others.",
        "All .log files belong in the folder {d}. Move them.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder),
        files={**moved, **stays},
        folders=(folder,),
        changed=tuple(moved),
        commands=(f"mv *.log {folder}/",),
        checks=(
            only(folder, list(moved)),
            *(gone(name) for name in moved),
            *(holds(f"{folder}/{name}", content) for name, content in moved.items()),
        ),
        cheat=f"mv * {folder}/",
    )


def _move_into_new(draw: Draw) -> Scene:
    name, folder, content = draw.file(), draw.folder(), draw.text()
    phrases = (
        "Make a new folder {d} and move {f} into it.",
        "Create {d} and put the file {f} there.",
        "Move {f} into a new folder named {d}.",
        "{f} should lie in a folder {d}, which doesn't exist yet.",
    )
    return Scene(
        instruction=draw.say(phrases, f=name, d=folder),
        files={name: content, **draw.clutter()},
        changed=(name,),
        commands=(f"mkdir {folder} && mv {name} {folder}/",),
        checks=(gone(name), only(folder, [name]), holds(f"{folder}/{name}", content)),
        cheat=f"mv {name} {folder}",
    )


def _swap(draw: Draw) -> Scene:
    one, other, spare = draw.file(), draw.file(), draw.word()
    contents = draw.text(), draw.text()
    phrases = (
        "Swap the names of {f} and {g}.",
        "Exchange the two files {f} and {g}: each gets the name of the other.",
        "Rename {f} to {g} and {g} to {f}.",
        "{f} and {g} have each other's name. Swap them.",
    )
    return Scene(
        instruction=draw.say(phrases, f=one, g=other),
        files={one: contents[0], other: contents[1], **draw.clutter()},
        changed=(one, other),
        commands=(f"mv {one} {spare} && mv {other} {one} && mv {spare} {other}",),
        checks=(holds(one, contents[1]), holds(other, contents[0]), gone(spare)),
        cheat=f"mv {one} {other}",
    )


MOVE: Final[Kind] = {
    "easy": (_move_into, _rename),
    "medium": (_move_and_rename, _move_two, _move_between),
    "hard": (_move_by_ending, _move_into_new, _swap),
}
