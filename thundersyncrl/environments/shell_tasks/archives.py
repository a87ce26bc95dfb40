"""Tasks with tar and gzip: the kind `archives`."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from typing import Final

from thundersyncrl.environments.shell_tasks.checks import gone, holds, lists, only, packs, packs_only, unzips
from thundersyncrl.environments.shell_tasks.scene import Kind, Scene
from thundersyncrl.environments.shell_tasks.words import ANIMALS, FRUITS, TOOLS, Draw


def tar_bytes(members: Mapping[str, bytes]) -> bytes:
    """A tar file with these members, the same bytes whenever and wherever it is made."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _unpack(draw: Draw) -> Scene:
    archive = draw.file("tar")
    members = {name: draw.text() for name in draw.files(2)}
    phrases = (
        "Unpack {a}.",
        "Extract all files from {a}.",
        "Please unpack the archive {a} here.",
        "Get the files out of {a}.",
        "{a} is an archive. Extract it.",
    )
    return Scene(
        instruction=draw.say(phrases, a=archive),
        files={archive: tar_bytes(members), **draw.clutter()},
        changed=(archive,),
        commands=(f"tar -xf {archive}",),
        checks=tuple(holds(name, content) for name, content in members.items()),
        cheat=f"touch {' '.join(members)}",
    )


def _pack(draw: Draw) -> Scene:
    folder, archive = draw.folder(), draw.file("tar")
    members = {f"{folder}/{name}": draw.text() for name in draw.files(2)}
    phrases = (
        "Pack the folder {d} into {a}.",
        "Make a tar archive {a} of the folder {d}.",
        "Put the directory {d} into a tar file named {a}.",
        "I need {d} as a tar archive called {a}.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder, a=archive),
        files={**members, **draw.clutter()},
        commands=(f"tar -cf {archive} {folder}",),
        checks=(
            packs_only(archive, list(members)),
            *(packs(archive, name, content) for name, content in members.items()),
        ),
        cheat=f"cat {folder}/* > {archive}",
    )


def _gzip(draw: Draw) -> Scene:
    name, content = draw.file(), draw.text(4)
    phrases = (
        "Compress {f} with gzip.",
        "Make {f}.gz from {f}.",
        "Use gzip to shrink the file {f}.",
        "Please gzip the file {f}.",
    )
    return Scene(
        instruction=draw.say(phrases, f=name),
        files={name: content, **draw.clutter()},
        changed=(name,),
        commands=(f"gzip {name}",),
        checks=(unzips(f"{name}.gz", content),),
        cheat=f"mv {name} {name}.gz",
    )


def _gunzip(draw: Draw) -> Scene:
    name, content = draw.file(), draw.text(4)
    phrases = (
        "Decompress {f}.gz.",
        "Get {f} back from {f}.gz.",
        "Please unzip the gzip file {f}.gz.",
        "Use gunzip on {f}.gz.",
    )
    return Scene(
        instruction=draw.say(phrases, f=name),
        files={f"{name}.gz": gzip.compress(content, mtime=0), **draw.clutter()},
        changed=(f"{name}.gz",),
        commands=(f"gunzip {name}.gz",),
        checks=(holds(name, content),),
        cheat=f"mv {name}.gz {name}",
    )


def _unpack_into(draw: Draw) -> Scene:
    archive, folder = draw.file("tar"), draw.folder()
    members = {name: draw.text() for name in draw.files(2)}
    phrases = (
        "Unpack {a} into the folder {d}.",
        "Extract the files of {a} to {d}.",
        "Put what is in the archive {a} into {d}.",
        "The files of {a} belong in the folder {d}. Extract them there.",
    )
    return Scene(
        instruction=draw.say(phrases, a=archive, d=folder),
        files={archive: tar_bytes(members), **draw.clutter()},
        folders=(folder,),
        changed=(archive,),
        commands=(f"tar -xf {archive} -C {folder}",),
        checks=(
            only(folder, list(members)),
            *(holds(f"{folder}/{name}", text) for name, text in members.items()),
        ),
        cheat=f"tar -xf {archive}",
    )


def _list_members(draw: Draw) -> Scene:
    archive, target = draw.file("tar"), draw.file("txt")
    members = draw.files(draw.number(3, 5))
    phrases = (
        "Write the names of the files in {a} to {g}, one a line.",
        "List what is inside the archive {a} and save the list as {g}.",
        "Which files does {a} hold? Put their names into {g}, one a line.",
        "Save the list of files in the tar file {a} as {g}.",
    )
    return Scene(
        instruction=draw.say(phrases, a=archive, g=target),
        files={archive: tar_bytes({name: draw.text() for name in members})},
        changed=(archive,),
        commands=(f"tar -tf {archive} > {target}",),
        checks=(lists(target, members),),
        cheat=f"echo {archive} > {target}",
    )


def _pack_compressed(draw: Draw) -> Scene:
    folder, archive = draw.folder(), draw.file("tar.gz")
    members = {f"{folder}/{name}": draw.text() for name in draw.files(3)}
    phrases = (
        "Pack the folder {d} into {a}, compressed with gzip.",
        "Make a gzipped tar archive {a} of the folder {d}.",
        "I need {d} as a compressed tar file called {a}.",
        "Put the directory {d} into the archive {a} and compress it with gzip.",
    )
    return Scene(
        instruction=draw.say(phrases, d=folder, a=archive),
        files={**members, **draw.clutter()},
        commands=(f"tar -czf {archive} {folder}",),
        checks=(
            f"gzip -t < {archive} 2> /dev/null",
            packs_only(archive, list(members)),
            *(packs(archive, name, content) for name, content in members.items()),
        ),
        cheat=f"tar -cf {archive} {folder}",
    )


def _unpack_chosen(draw: Draw) -> Scene:
    archive, pools = draw.file("tar"), {"animal": ANIMALS, "fruit": FRUITS, "tool": TOOLS}
    members = {f"{draw.word(pool)}.txt": draw.text() for pool in pools.values()}
    category, chosen = draw.one_of(list(zip(pools, members, strict=True)))
    phrases = (
        "{a} holds several files. Extract only the one named after {c}.",
        "Unpack just one file of {a}: the one whose name is {c}.",
        "One file in the archive {a} is named after {c}. Extract that one and no other.",
        "Look into {a} and extract only the file that is called like {c}.",
    )
    article = "an" if category == "animal" else "a"
    return Scene(
        instruction=draw.say(phrases, a=archive, c=f"{article} {category}"),
        files={archive: tar_bytes(dict(draw.shuffled(list(members.items()))))},
        changed=(archive,),
        commands=(f"tar -tf {archive}", f"tar -xf {archive} {chosen}"),
        checks=(holds(chosen, members[chosen]), *(gone(name) for name in members if name != chosen)),
        cheat=f"tar -xf {archive}",
        hidden=(chosen,),
    )


ARCHIVES: Final[Kind] = {
    "easy": (_unpack, _pack, _gzip, _gunzip),
    "medium": (_unpack_into, _list_members),
    "hard": (_pack_compressed, _unpack_chosen),
}
