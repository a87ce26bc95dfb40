"""Files of worlds are bounded, and removed however they were left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from thundersyncrl.environments import storage
from thundersyncrl.environments.storage import Storage

CHILD = """
import sys
from pathlib import Path
from thundersyncrl.environments import storage
store = storage.Storage(Path(sys.argv[1]))
world = store.new_world()
storage.mount_tmpfs(world, size_bytes=1 << 20)
(world / "file").write_text("x")
store.note_groups([Path("/nowhere")])
print(store.folder, flush=True)
sys.stdin.read()
"""


def test_a_storage_goes_away_with_everything_in_it(tmp_path: Path) -> None:
    store = Storage(tmp_path)
    worlds = {store.new_world() for _ in range(3)}
    assert len(worlds) == 3
    deep = next(iter(worlds))
    for _ in range(50):
        deep = deep / "d"
        deep.mkdir()
    (deep / "file").touch()
    store.remove()
    store.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_holds_is_kept(tmp_path: Path) -> None:
    held = Storage(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    left = Path(child.stdout.readline().strip())
    assert storage.remove_abandoned(tmp_path) == []
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    child.stdin.close()
    removed = storage.remove_abandoned(tmp_path)
    assert [(found.name, found.group_parents) for found in removed] == [(left.name, (Path("/nowhere"),))]
    assert not left.exists()
    assert held.folder.exists()
    held.remove()


def test_a_forked_child_leaves_its_parents_storage_alone(tmp_path: Path) -> None:
    store = Storage(tmp_path)
    child = os.fork()
    if child == 0:
        store.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert store.folder.exists()
    store.remove()


def test_a_mounted_disk_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    if not storage.mount_tmpfs(tmp_path, size_bytes=1 << 20):
        pytest.skip("we may not mount here")
    try:
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "big").write_bytes(bytes(2 << 20))
        assert storage.mount_tmpfs(tmp_path, size_bytes=4 << 20, remount=True)
        (tmp_path / "big").write_bytes(bytes(2 << 20))
    finally:
        storage.unmount(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_used_bytes_counts_everything_below(tmp_path: Path) -> None:
    before = storage.used_bytes(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(bytes(300_000))
    (tmp_path / "link").symlink_to("/usr")
    assert 300_000 <= storage.used_bytes(tmp_path) - before < 400_000


def test_copying_keeps_links_as_links_and_modes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "secret").symlink_to("/etc/passwd")
    (source / "run.sh").write_text("x")
    (source / "run.sh").chmod(0o751)
    storage.copy_in(source, tmp_path / "deep/target", root=tmp_path)
    assert os.readlink(tmp_path / "deep/target/secret") == "/etc/passwd"
    assert (tmp_path / "deep/target/run.sh").stat().st_mode & 0o777 == 0o751
    storage.copy_in(source / "secret", tmp_path / "alone", root=tmp_path)
    assert os.readlink(tmp_path / "alone") == "/etc/passwd"


@pytest.mark.parametrize("target", ["out/file", "out", "."])
def test_nothing_is_written_through_a_link_that_an_earlier_copy_left(tmp_path: Path, target: str) -> None:
    world, outside, source = (tmp_path / name for name in ("world", "outside", "source"))
    for folder in (world, outside, source / "out"):
        folder.mkdir(parents=True)
    (source / "out/file").write_text("x")
    (world / "out").symlink_to(outside)
    copied = {"out/file": source / "out/file", "out": source / "out", ".": source}[target]
    with pytest.raises(OSError, match="a symbolic link on the way"):
        storage.copy_in(copied, world / target, root=world)
    assert list(outside.iterdir()) == []


def test_removal_survives_modes_and_a_thousand_levels(tmp_path: Path) -> None:
    folder = tmp_path / "world"
    folder.mkdir()
    here = os.getcwd()
    os.chdir(folder)
    try:
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    (folder / "closed").mkdir(mode=0)
    storage.remove_tree(folder)
    assert not folder.exists()
