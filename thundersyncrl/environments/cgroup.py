"""Control groups (v1 and v2): count and limit a world's processes, memory and CPU time, where the kernel lets us.

A controller that can't be used is simply absent from `Controllers`; the sandbox then falls back to rlimits
for it.

Source: Linux Documentation/admin-guide/cgroup-v1 and cgroup-v2.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpuacct")

_PROBE_VALUES = {"memory": 1 << 30, "pids": 1 << 15}


@dataclass(frozen=True, slots=True, kw_only=True)
class Controllers:
    """Where child groups of each usable controller may be made."""

    version: int
    """1 or 2; 0 when no controller can be used."""
    parents: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Controller to the folder of the parent group. CPU accounting is called "cpuacct" in both versions."""

    def __contains__(self, controller: str) -> bool:
        return controller in self.parents


def detect(*, root: Path = Path("/"), probe_name: str) -> Controllers:
    """Return the controllers that this process may use, each shown by making a group with a limit and removing it.

    Args:
        root: file system root; another one only in tests.
        probe_name: name of the group that is made and removed.
    """
    try:
        own = _own_groups((root / "proc/self/cgroup").read_text())
        mounts = _mounts((root / "proc/self/mountinfo").read_text(), root)
    except OSError:
        return Controllers(version=0)
    v1 = {name: _v1_parent(name, own, mounts) for name in CONTROLLERS if name in mounts}
    usable = {name: parent for name, parent in v1.items() if _can_limit(parent / probe_name, name, 1)}
    if usable:
        return Controllers(version=1, parents=usable)
    if "" not in mounts:
        return Controllers(version=0)
    return _detect_v2(mounts[""], own.get("", "/"), probe_name)


def _own_groups(text: str) -> dict[str, str]:
    """Return controller to path within its hierarchy; "" is the unified one."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _mounts(text: str, root: Path) -> dict[str, tuple[Path, str]]:
    """Return controller to (mount point, path of the hierarchy that is mounted there); "" is the unified one."""
    found: dict[str, tuple[Path, str]] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        mounted, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        place = (root / point.lstrip("/"), mounted)
        if kind == "cgroup2":
            found[""] = place
        elif kind == "cgroup":
            found.update({name: place for name in options.split(",") if name in CONTROLLERS})
    return found


def _below(place: tuple[Path, str], path: str) -> Path:
    """Return the folder of a group, given what part of the hierarchy is mounted (a container sees only its own)."""
    point, mounted = place
    if path == mounted or path.startswith(mounted.rstrip("/") + "/"):
        path = path[len(mounted.rstrip("/")) :]
    return point / path.lstrip("/")


def _v1_parent(name: str, own: Mapping[str, str], mounts: Mapping[str, tuple[Path, str]]) -> Path:
    return _below(mounts[name], own.get(name, "/"))


def _detect_v2(place: tuple[Path, str], path: str, probe_name: str) -> Controllers:
    """Look from the own group upwards: a group with processes can't hand controllers to children, an ancestor may."""
    own = _below(place, path)
    for parent in (own, *own.parents):
        if not parent.is_relative_to(place[0]):
            break
        try:
            enabled = (parent / "cgroup.subtree_control").read_text().split()
        except OSError:
            continue
        usable = {
            name: parent for name in ("memory", "pids") if name in enabled and _can_limit(parent / probe_name, name, 2)
        }
        if usable:
            return Controllers(version=2, parents={**usable, "cpuacct": parent})
    return Controllers(version=0)


def _can_limit(group: Path, controller: str, version: int) -> bool:
    try:
        group.mkdir()
    except OSError:
        return False
    try:
        _write_limit(group, controller, version, _PROBE_VALUES.get(controller, 0))
        return os.access(group / "cgroup.procs", os.W_OK)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def _write_limit(group: Path, controller: str, version: int, value: int) -> None:
    names = {
        ("memory", 1): "memory.limit_in_bytes",
        ("memory", 2): "memory.max",
        ("pids", 1): "pids.max",
        ("pids", 2): "pids.max",
    }
    name = names.get((controller, version))
    if name is None:
        return
    (group / name).write_text(str(value))
    swap = {("memory", 1): ("memory.memsw.limit_in_bytes", value), ("memory", 2): ("memory.swap.max", 0)}
    if (controller, version) in swap:
        file, most = swap[controller, version]
        # Absent where the kernel doesn't count swap; then there is nothing to limit.
        with contextlib.suppress(OSError):
            if (group / file).exists():
                (group / file).write_text(str(most))


class ControlGroup:
    """The group of one world; without usable controllers every method does nothing and every count is 0.

    Args:
        controllers: what `detect` found.
        name: folder name of the group, unique on this machine.
        memory_bytes: of all processes and of the files in memory together.
        max_processes: processes and threads.

    Raises:
        OSError: a group can't be made although it could when it was detected.
    """

    def __init__(self, controllers: Controllers, *, name: str, memory_bytes: int, max_processes: int) -> None:
        self._controllers = controllers
        self._folders = {controller: parent / name for controller, parent in controllers.parents.items()}
        values = {"memory": memory_bytes, "pids": max_processes}
        try:
            for controller, folder in self._folders.items():
                # In v2, and where v1 mounts controllers together, folders coincide.
                folder.mkdir(exist_ok=True)
                if controller in values:
                    _write_limit(folder, controller, controllers.version, values[controller])
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Put a process, with its later children, into the group."""
        for folder in set(self._folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    @property
    def counts_cpu(self) -> bool:
        return "cpuacct" in self._folders

    def cpu_s(self) -> float:
        """CPU seconds of all processes that were ever in the group."""
        if "cpuacct" not in self._folders:
            return 0.0
        if self._controllers.version == 1:
            return int((self._folders["cpuacct"] / "cpuacct.usage").read_text()) / 1e9
        return _field(self._folders["cpuacct"] / "cpu.stat", "usage_usec") / 1e6

    def num_memory_kills(self) -> int:
        """Processes that the kernel killed for memory."""
        if "memory" not in self._folders:
            return 0
        file = "memory.oom_control" if self._controllers.version == 1 else "memory.events"
        return _field(self._folders["memory"] / file, "oom_kill")

    def num_refused_forks(self) -> int:
        """Forks that the kernel refused."""
        return _field(self._folders["pids"] / "pids.events", "max") if "pids" in self._folders else 0

    def kill(self) -> None:
        """Send SIGKILL to every process of the group."""
        for folder in set(self._folders.values()):
            _kill_all(folder)

    def remove(self) -> None:
        """Remove the group; it must hold no process. What can't be removed now is left for `remove_abandoned`."""
        for folder in set(self._folders.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()


def remove_abandoned(parents: Iterable[Path], prefix: str) -> None:
    """Kill and remove the groups below `parents` whose name begins with `prefix`, left by a process that was killed."""
    for parent in parents:
        for folder in parent.glob(f"{prefix}*"):
            _kill_all(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()


def _kill_all(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if (folder / "cgroup.kill").exists():
            (folder / "cgroup.kill").write_text("1")
            return
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _field(file: Path, name: str) -> int:
    """Return the number after `name` in a flat keyed file; 0 where this kernel doesn't have it."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(words[1]) for words in lines if len(words) == 2 and words[0] == name), 0)
