"""Control groups are found where they can be used, in both versions, and limit what they say."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from thundersyncrl.environments.cgroup import ControlGroup, Controllers, detect, remove_abandoned

FILES = {
    1: {"memory.limit_in_bytes": "", "memory.memsw.limit_in_bytes": "", "pids.max": "", "cpuacct.usage": "0"},
    2: {"memory.max": "max", "memory.swap.max": "max", "pids.max": "max", "cpu.stat": "usage_usec 2500000\n"},
}


def fake_machine(
    root: Path, monkeypatch: pytest.MonkeyPatch, *, version: int, own: str, mountinfo: str, groups: dict[str, str]
) -> None:
    """Make a file system root whose groups, like the kernel's, have their files as soon as they are made."""
    real_mkdir = Path.mkdir

    def mkdir(self: Path, *args: object, **keywords: object) -> None:
        is_new = not self.exists()
        real_mkdir(self, *args, **keywords)  # type: ignore[arg-type]
        if "cgroup" in self.parts and is_new:
            for name, text in {**FILES[version], "cgroup.procs": ""}.items():
                (self / name).write_text(text)

    for path, enabled in groups.items():
        (root / path).mkdir(parents=True)
        if version == 2:
            (root / path / "cgroup.subtree_control").write_text(enabled)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    (root / "proc/self/mountinfo").write_text(mountinfo)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)


V2_MOUNT = "31 22 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def test_version_2_takes_the_nearest_ancestor_that_hands_controllers_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"sys/fs/cgroup": "cpu memory pids", "sys/fs/cgroup/a": "memory pids", "sys/fs/cgroup/a/b": ""}
    fake_machine(tmp_path, monkeypatch, version=2, own="0::/a/b\n", mountinfo=V2_MOUNT, groups=groups)
    found = detect(root=tmp_path, probe_name="probe")
    parent = tmp_path / "sys/fs/cgroup/a"
    assert found == Controllers(version=2, parents={"memory": parent, "pids": parent, "cpuacct": parent})


def test_version_2_without_handed_on_controllers_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_machine(tmp_path, monkeypatch, version=2, own="0::/\n", mountinfo=V2_MOUNT, groups={"sys/fs/cgroup": ""})
    assert detect(root=tmp_path, probe_name="probe") == Controllers(version=0)


def test_version_2_limits_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_machine(
        tmp_path,
        monkeypatch,
        version=2,
        own="0::/\n",
        mountinfo=V2_MOUNT,
        groups={"sys/fs/cgroup": "memory pids"},
    )
    found = detect(root=tmp_path, probe_name="probe")
    group = ControlGroup(found, name="world", memory_bytes=1000, max_processes=7)
    folder = tmp_path / "sys/fs/cgroup/world"
    assert (folder / "memory.max").read_text() == "1000"
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "pids.max").read_text() == "7"
    (folder / "memory.events").write_text("low 0\nmax 3\noom 1\noom_kill 2\n")
    (folder / "pids.events").write_text("max 5\n")
    assert (group.cpu_s(), group.num_memory_kills(), group.num_refused_forks()) == (2.5, 2, 5)
    group.add(123)
    assert (folder / "cgroup.procs").read_text() == "123"


def test_version_1_is_found_below_the_own_group_as_a_container_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mountinfo = (
        "1 2 0:3 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "1 2 0:4 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    own = "5:memory:/docker/x/y\n4:cpu,cpuacct:/\n0::/\n"
    groups = dict.fromkeys(("sys/fs/cgroup/memory/y", "sys/fs/cgroup/cpu,cpuacct"), "")
    fake_machine(tmp_path, monkeypatch, version=1, own=own, mountinfo=mountinfo, groups=groups)
    base = tmp_path / "sys/fs/cgroup"
    expected = {"memory": base / "memory/y", "cpuacct": base / "cpu,cpuacct"}
    assert detect(root=tmp_path, probe_name="probe") == Controllers(version=1, parents=expected)


def test_a_machine_without_control_groups_has_none(tmp_path: Path) -> None:
    assert detect(root=tmp_path, probe_name="probe") == Controllers(version=0)


def test_without_controllers_every_count_is_zero() -> None:
    group = ControlGroup(Controllers(version=0), name="x", memory_bytes=1, max_processes=1)
    group.add(os.getpid())
    group.kill()
    group.remove()
    assert (group.cpu_s(), group.num_memory_kills(), group.num_refused_forks()) == (0.0, 0, 0)


def test_abandoned_groups_are_killed_and_removed() -> None:
    name = f"thundersync-test-{os.getpid()}"
    found = detect(probe_name=f"{name}-probe")
    if not found.version:
        pytest.skip("this machine lets us use no control groups")
    group = ControlGroup(found, name=f"{name}-w1", memory_bytes=1 << 26, max_processes=8)
    child = subprocess.Popen(["sleep", "300"])
    try:
        group.add(child.pid)
        remove_abandoned(set(found.parents.values()), name)
        assert child.wait(10) == -9
    finally:
        child.kill()
        child.wait()
        group.remove()
    assert not [path for parent in found.parents.values() for path in parent.glob(f"{name}*")]
