"""Tasks that delete some of what is there and keep the rest: the kind `delete`."""

from __future__ import annotations

from typing import Final

from thundersyncrl.environments.shell_tasks.checks import gone, only
from thundersyncrl.environments.shell_tasks.scene import Kind, Scene
from thundersyncrl.environments.shell_tasks.words import Draw


def _delete_file(draw: Draw) -> Scene:
    name = draw.file()
    phrases = (
        "Delete {f}.",
        "Remove the file {f}.",
        "Please delete the file {f}.",
        "I don't need {f} any more. Delete it.",
        "Get rid of {f}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=name),
        files={name: draw.text(), **draw.clutter()},
        changed=(name,),
        commands=(f"rm {name}",),
        checks=(gone(name),),
        cheat="rm -rf *",
    )


def _delete_folder(draw: Draw) -> Scene:
    folder = draw.folder()
    phrases = (
        "Delete the folder {d}.",
        "Remove the folder {d} and all in it.",
        "Please delete the directory {d} with its files.",
        "I don't need the folder {d} any more. Remove it.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder),
        files={f"{folder}/{draw.file()}": draw.text(), **draw.clutter()},
        changed=(folder,),
        commands=(f"rm -r {folder}",),
        checks=(gone(folder),),
        cheat=f"rm {folder}/*",
    )


def _delete_two(draw: Draw) -> Scene:
    one, other = draw.files(2)
    phrases = (
        "Delete {f} and {g}.",
        "Remove the files {f} and {g}.",
        "I need neither {f} nor {g}. Delete both.",
        "Please get rid of {f} and {g}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=one, g=other),
        files={one: draw.text(), other: draw.text(), **draw.clutter()},
        changed=(one, other),
        commands=(f"rm {one} {other}",),
        checks=(gone(one), gone(other)),
        cheat="rm *",
    )


def _delete_by_ending(draw: Draw) -> Scene:
    folder = draw.folder()
    deleted, stays = draw.files(2, "log"), draw.files(2, "txt")
    phrases = (
        "Delete all .log files in {d}.",
        "Remove every file of {d} that ends in .log.",
        "Clean up {d}: the .log files can go, the others stay.",
        "Please delete the .log files in the folder {d}.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder),
        files={f"{folder}/{name}": draw.text() for name in (*deleted, *stays)},
        changed=tuple(f"{folder}/{name}" for name in deleted),
        commands=(f"rm {folder}/*.log",),
        checks=(only(folder, stays),),
        cheat=f"rm {folder}/*",
    )


def _delete_but(draw: Draw) -> Scene:
    folder = draw.folder()
    stays, *deleted = draw.files(draw.number(3, 5))
    phrases = (
        "Delete every file in {d} but {f}.",
        "Keep only {f} in {d} and delete the other files there.",
        "Remove all files from {d} except {f}.",
        "In the folder {d} only {f} should stay. Delete the rest.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder, f=stays),
        files={f"{folder}/{name}": draw.text() for name in draw.shuffled([stays, *deleted])},
        changed=tuple(f"{folder}/{name}" for name in deleted),
        commands=(f"find {folder} -type f ! -name {stays} -delete",),
        checks=(only(folder, [stays]),),
        cheat=f"rm -r {folder}; mkdir {folder}; touch {folder}/{stays}",
    )


def _delete_empty(draw: Draw) -> Scene:
    folder = draw.folder()
    deleted, stays = draw.files(2), draw.files(2)
    phrases = (
        "Delete the empty files in {d}.",
        "Remove every file of {d} that has nothing in it.",
        "Some files in the folder {d} are empty. Delete those.",
        "Clean {d}: empty files can go, the others stay.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder),
        files={f"{folder}/{name}": b"" if name in deleted else draw.text() for name in draw.shuffled(deleted + stays)},
        changed=tuple(f"{folder}/{name}" for name in deleted),
        commands=(f"find {folder} -type f -empty -delete",),
        checks=(only(folder, stays),),
        cheat=f"rm {folder}/*",
    )


DELETE: Final[Kind] = {
    "easy": (_delete_file, _delete_folder),
    "medium": (_delete_two, _delete_by_ending),
    "hard": (_delete_but, _delete_empty),
}
