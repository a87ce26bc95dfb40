"""Where worlds keep their files: one folder per process of ours, one below it per world.

As root a world's files lie on a tmpfs of its own, so the kernel holds it to its size. Elsewhere they lie in a
plain folder whose size is measured. A folder whose process was killed is found by its free lock and removed
by the next process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "thundersync-sandbox-"

# Source: Linux include/uapi/linux/mount.h and umount2(2).
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 2, 4, 32
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


class Storage:
    """This process's folder for worlds; made when it is first needed, removed at exit.

    Args:
        parent: folder to make it in.
    """

    def __init__(self, parent: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Searchable but not listable: sandboxes run as another user and need to reach their own files by
        # name.
        self.folder.chmod(0o711)
        # Locked before it gets its name, so that nobody finds it free and takes the folder for abandoned.
        self._lock = os.open(self.folder / "lock.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.folder / "lock.new", self.folder / "lock")
        self._pid = os.getpid()
        self._num_worlds = 0
        self._before_removal: list[Callable[[], None]] = []
        atexit.register(self.remove)

    @property
    def name(self) -> str:
        """Unique on this machine; control groups are named after it."""
        return self.folder.name

    def new_world(self) -> Path:
        """Return an empty folder for one world."""
        self._num_worlds += 1
        world = self.folder / f"w{self._num_worlds}"
        world.mkdir()
        world.chmod(0o711)  # whatever our umask is
        return world

    def note_groups(self, parents: Iterable[Path]) -> None:
        """Write down where this process makes control groups, for whoever has to remove them after a crash."""
        (self.folder / "groups").write_text("\n".join(str(parent) for parent in parents))

    def before_removal(self, callback: Callable[[], None]) -> None:
        """Call this first when the storage is removed."""
        self._before_removal.append(callback)

    def remove(self) -> None:
        """Remove everything. Idempotent; a forked child leaves its parent's folder alone."""
        if self._pid == os.getpid() and self.folder.exists():
            for callback in self._before_removal:
                callback()
            remove_tree(self.folder)
            os.close(self._lock)


_current: dict[int, Storage] = {}
_guard = threading.Lock()


def current() -> Storage:
    """Return this process's storage; a forked child gets its own."""
    with _guard:
        pid = os.getpid()
        if pid not in _current:
            _current.clear()
            _current[pid] = Storage(Path(tempfile.gettempdir()))
        return _current[pid]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """A storage whose process was killed, and which has been removed."""

    name: str
    group_parents: tuple[Path, ...]
    """Where its control groups may still be."""


def remove_abandoned(parent: Path) -> list[Abandoned]:
    """Remove the storages below `parent` whose process no longer lives."""
    removed: list[Abandoned] = []
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another process removes it now, or has not made its lock yet
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            groups = (folder / "groups").read_text().splitlines() if (folder / "groups").exists() else []
            remove_tree(folder)
            removed.append(Abandoned(name=folder.name, group_parents=tuple(map(Path, groups))))
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
    return removed


def mount_tmpfs(folder: Path, *, size_bytes: int, remount: bool = False) -> bool:
    """Mount a tmpfs of the given size, or change the size of a mounted one. Return False where we may not mount."""
    # An entry costs the kernel about a kilobyte, so entries are bounded like bytes are.
    options = f"size={size_bytes},nr_inodes={max(1024, size_bytes // 1024)},mode=711".encode()
    flags = _MS_NOSUID | _MS_NODEV | (_MS_REMOUNT if remount else 0)
    return _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options) == 0


def unmount(folder: Path) -> None:
    """Unmount what is mounted at `folder`, if anything is."""
    _libc.umount2(os.fsencode(folder), _MNT_DETACH)


def remove_tree(folder: Path) -> None:
    """Unmount what lies below and remove everything, whatever names, depths and modes an agent left there."""
    with contextlib.suppress(OSError):
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        below = [p for p in points if Path(p).is_relative_to(folder)]
        for point in sorted(below, reverse=True):
            unmount(Path(point))
    # Programs rather than shutil.rmtree, which recurses: a tree a thousand folders deep would end it.
    commands = [["/bin/rm", "-rf", "--", folder]]
    if os.getuid() != 0:
        commands.insert(0, ["/bin/chmod", "-R", "u+rwX", "--", folder])
    with contextlib.suppress(subprocess.TimeoutExpired):  # the next process of ours goes on with it
        for command in commands:
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False, timeout=60)


def used_bytes(folder: Path) -> int:
    """Return the bytes on disk of everything below `folder`; what can't be entered counts as empty."""
    done = subprocess.run(["/usr/bin/du", "-s", "-B1", "--", folder], capture_output=True, check=False, timeout=60)
    return int(done.stdout.split()[0])


def copy_in(source: Path, target: Path, *, root: Path) -> None:
    """Copy a file, or what a folder holds, to `target`; symbolic links stay links.

    Args:
        root: folder that holds `target`. A link that an earlier copy left below it is never written through, since
            it may lead out of it.

    Raises:
        OSError: unreadable source, no room, or a link on the way.
    """
    for path in (target, *target.parents, *(target / name for name in _names_below(source))):
        if path != root and path.is_relative_to(root) and path.is_symlink():
            raise OSError(f"a symbolic link on the way to {target.relative_to(root)}: {path.relative_to(root)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _names_below(folder: Path) -> Iterator[Path]:
    """Give the path of everything in a folder, relative to it; nothing for a file."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name).relative_to(folder) for name in (*folders, *files))


def give_to(folder: Path, owner: int) -> None:
    """Make `owner` the owner of everything below `folder` and of itself."""
    os.chown(folder, owner, owner, follow_symlinks=False)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(os.path.join(parent, name), owner, owner, follow_symlinks=False)
