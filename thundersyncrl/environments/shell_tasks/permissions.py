"""Tasks on who may do what with a file: the kind `permissions`."""

from __future__ import annotations

from typing import Final

from thundersyncrl.environments.shell_tasks.checks import has_mode, runnable
from thundersyncrl.environments.shell_tasks.scene import Kind, Scene
from thundersyncrl.environments.shell_tasks.words import Draw

MODES: Final = (0o400, 0o440, 0o444, 0o600, 0o640, 0o660, 0o664, 0o700, 0o750, 0o755)


def _script(draw: Draw) -> bytes:
    return f"#!/bin/sh\necho {draw.thing()} {draw.number(100, 999)}\n".encode()


def _set_mode(draw: Draw) -> Scene:
    name, mode = draw.file(), draw.one_of(MODES)
    phrases = (
        "Set the permissions of {f} to {m}.",
        "Give {f} the mode {m}.",
        "Change the mode of the file {f} to {m}.",
        "{f} should have the permissions {m}. Set them.",
        "Please set the mode of {f} to {m}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=name, m=f"{mode:o}"),
        files={name: draw.text(), **draw.clutter()},
        commands=(f"chmod {mode:o} {name}",),
        checks=(has_mode(name, mode),),
        cheat=f"chmod 777 {name}",
    )


def _make_runnable(draw: Draw) -> Scene:
    name = draw.file("sh")
    phrases = (
        "Make {f} executable.",
        "Make it possible to run the script {f}.",
        "I can't run {f}. Make it executable.",
        "Please give {f} the permission to be executed.",
    )
    return Scene(
        instruction=draw.say(phrases, f=name),
        files={name: _script(draw), **draw.clutter()},
        commands=(f"chmod +x {name}",),
        checks=(runnable(name),),
        cheat=f"chmod 777 {name}",
    )


def _keep_private(draw: Draw) -> Scene:
    name = draw.file()
    phrases = (
        "Only the owner may read and write {f}; nobody else may do anything with it.",
        "Let the owner read and write {f} and give all others no permissions.",
        "Keep {f} private: read and write for the owner, nothing for the rest.",
    )
    return Scene(
        instruction=draw.say(phrases, f=name),
        files={name: draw.text(), **draw.clutter()},
        commands=(f"chmod 600 {name}",),
        checks=(has_mode(name, 0o600),),
        cheat=f"chmod 666 {name}",
    )


def _write_protect(draw: Draw) -> Scene:
    name = draw.file()
    phrases = (
        "Take the write permission on {f} away from everybody.",
        "Make {f} read-only for everyone, the owner too.",
        "Nobody should be allowed to write to {f}. Reading stays as it is.",
        "Protect {f} from writing, for all users.",
    )
    return Scene(
        instruction=draw.say(phrases, f=name),
        files={name: draw.text(), **draw.clutter()},
        commands=(f"chmod a-w {name}",),
        checks=(has_mode(name, 0o444),),
        cheat=f"chmod 000 {name}",
    )


def _set_two(draw: Draw) -> Scene:
    (one, other), modes = draw.files(2), draw.rng.sample(MODES, 2)
    phrases = (
        "Set {f} to mode {m} and {g} to mode {n}.",
        "Give {f} the permissions {m} and {g} the permissions {n}.",
        "Change the mode of {f} to {m} and that of {g} to {n}.",
        "{f} needs mode {m}, and {g} needs mode {n}. Set both.",
    )
    return Scene(
        instruction=draw.say(phrases, f=one, g=other, m=f"{modes[0]:o}", n=f"{modes[1]:o}"),
        files={one: draw.text(), other: draw.text()},
        commands=(f"chmod {modes[0]:o} {one} && chmod {modes[1]:o} {other}",),
        checks=(has_mode(one, modes[0]), has_mode(other, modes[1])),
        cheat=f"chmod {modes[0]:o} {one} {other}",
    )


def _same_as(draw: Draw) -> Scene:
    one, other = draw.files(2)
    mode = draw.one_of([mode for mode in MODES if mode & 0o200])
    phrases = (
        "Give {f} the same permissions as {g}.",
        "Set the mode of {f} to that of {g}.",
        "{f} should have the permissions that {g} has.",
        "Copy the permissions of {g} to {f}, not its content.",
    )
    return Scene(
        instruction=draw.say(phrases, f=one, g=other),
        files={one: draw.text(), other: draw.text()},
        modes={other: mode},
        commands=(f"chmod --reference={other} {one}",),
        checks=(has_mode(one, mode), has_mode(other, mode)),
        cheat=f"cp -p {other} {one}",
    )


def _runnable_by_ending(draw: Draw) -> Scene:
    folder = draw.folder()
    scripts, others = draw.files(draw.number(2, 3), "sh"), draw.files(2, "txt")
    phrases = (
        "Make all .sh files in {d} executable, but no other file.",
        "Make every script of {d} that ends in .sh executable and leave the rest alone.",
        "The .sh files in the folder {d} should be executable, and only those.",
        "Please make just the .sh files in {d} executable.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder),
        files={f"{folder}/{name}": _script(draw) for name in (*scripts, *others)},
        commands=(f"chmod +x {folder}/*.sh",),
        checks=(
            *(runnable(f"{folder}/{name}") for name in scripts),
            *(has_mode(f"{folder}/{name}", 0o644) for name in others),
        ),
        cheat=f"chmod +x {folder}/*",
    )


def _tree(draw: Draw) -> Scene:
    outer, inner = draw.folder(), draw.folder()
    paths = [f"{outer}/{draw.file()}", f"{outer}/{inner}/{draw.file()}", f"{outer}/{inner}/{draw.file()}"]
    mode = draw.one_of((0o600, 0o640, 0o660, 0o664))
    phrases = (
        "Set every file in {d} and in its subfolders to mode {m}. Leave the folders as they are.",
        "Give all files anywhere under {d} the permissions {m}, but don't change folders.",
        "Change the mode of each file in the tree {d} to {m}; folders keep theirs.",
    )
    return Scene(
        instruction=draw.say(phrases, d=outer, m=f"{mode:o}"),
        files={path: draw.text() for path in paths},
        commands=(f"find {outer} -type f -exec chmod {mode:o} {{}} +",),
        checks=(
            *(has_mode(path, mode) for path in paths),
            has_mode(outer, 0o755),
            has_mode(f"{outer}/{inner}", 0o755),
        ),
        cheat=f"chmod -R {mode:o} {outer}",
    )


PERMISSIONS: Final[Kind] = {
    "easy": (_set_mode, _make_runnable),
    "medium": (_keep_private, _write_protect, _set_two),
    "hard": (_same_as, _runnable_by_ending, _tree),
}
