"""Tasks that copy what is there: the kind `copy`."""

from __future__ import annotations

from typing import Final

from thundersyncrl.environments.shell_tasks.checks import apart, holds, only
from thundersyncrl.environments.shell_tasks.scene import Kind, Scene
from thundersyncrl.environments.shell_tasks.words import Draw


def _copy_file(draw: Draw) -> Scene:
    old, new, content = draw.file(), draw.file(), draw.text()
    phrases = (
        "Copy {f} to {g}.",
        "Make a copy of {f} called {g}.",
        "Duplicate {f} as {g}.",
        "I need a copy of the file {f} with the name {g}.",
        "Please copy the file {f} to a new file {g}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=old, g=new),
        files={old: content, **draw.clutter()},
        commands=(f"cp {old} {new}",),
        checks=(holds(new, content), apart(old, new)),
        cheat=f"mv {old} {new}",
    )


def _copy_into(draw: Draw) -> Scene:
    name, folder, content = draw.file(), draw.folder(), draw.text()
    phrases = (
        "Copy {f} into the folder {d}.",
        "Put a copy of {f} into {d}.",
        "The folder {d} needs a copy of {f}.",
        "Please copy the file {f} to {d}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=name, d=folder),
        files={name: content, **draw.clutter()},
        folders=(folder,),
        commands=(f"cp {name} {folder}/",),
        checks=(holds(f"{folder}/{name}", content), apart(name, f"{folder}/{name}")),
        cheat=f"mv {name} {folder}/",
    )


def _copy_as(draw: Draw) -> Scene:
    old, new, folder, content = draw.file(), draw.file(), draw.folder(), draw.text()
    phrases = (
        "Copy {f} into {d} under the name {g}.",
        "Put a copy of {f} into the folder {d} and call it {g}.",
        "In {d} there should be a copy of {f} named {g}.",
        "Please copy {f} to {d} as {g}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=old, g=new, d=folder),
        files={old: content, **draw.clutter()},
        folders=(folder,),
        commands=(f"cp {old} {folder}/{new}",),
        checks=(only(folder, [new]), holds(f"{folder}/{new}", content), apart(old, f"{folder}/{new}")),
        cheat=f"cp {old} {folder}/",
    )


def _copy_folder(draw: Draw) -> Scene:
    source, target = draw.folder(), draw.folder()
    contents = {name: draw.text() for name in draw.files(2)}
    phrases = (
        "Copy the folder {d} to {e}.",
        "Make a copy of the whole folder {d} called {e}.",
        "Duplicate the directory {d} as {e}.",
        "I need a copy of the folder {d} with the name {e}.",
    )
    return Scene(
        instruction=draw.say(phrases, d=source, e=target),
        files={f"{source}/{name}": content for name, content in contents.items()},
        commands=(f"cp -r {source} {target}",),
        checks=(
            only(target, list(contents)),
            apart(source, target),
            *(holds(f"{target}/{name}", content) for name, content in contents.items()),
        ),
        cheat=f"mkdir {target}",
    )


def _copy_by_ending(draw: Draw) -> Scene:
    source, target = draw.folder(), draw.folder()
    copied = {name: draw.text() for name in draw.files(2, "txt")}
    stays = {name: draw.text() for name in draw.files(2, "log")}
    phrases = (
        "Copy all .txt files from {d} to {e}.",
        "Put a copy of every .txt file in {d} into {e}.",
        "The folder {e} needs copies of the .txt files in {d}, but not of the others.",
        "Please copy just the files of {d} that end in .txt into {e}.",
    )
    return Scene(
        instruction=draw.say(phrases, d=source, e=target),
        files={f"{source}/{name}": content for name, content in {**copied, **stays}.items()},
        folders=(target,),
        commands=(f"cp {source}/*.txt {target}/",),
        checks=(
            only(target, list(copied)),
            *(holds(f"{target}/{name}", text) for name, text in copied.items()),
        ),
        cheat=f"cp {source}/* {target}/",
    )


COPY: Final[Kind] = {
    "easy": (_copy_file, _copy_into),
    "medium": (_copy_as, _copy_folder),
    "hard": (_copy_by_ending,),
}
