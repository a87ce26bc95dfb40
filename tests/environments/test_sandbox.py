"""A world keeps what is in it in, what is outside out, and ends whatever is started in it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import thundersyncrl
from tests.environments.builders import own_descendants, processes_with
from thundersyncrl.environments import storage
from thundersyncrl.environments.isolation import Isolation, detect, remove_abandoned
from thundersyncrl.environments.limits import Limits
from thundersyncrl.environments.sandbox import CommandResult, Mount, Sandbox
from thundersyncrl.errors import EnvironmentFailure, PhaseError

pytestmark = pytest.mark.sandbox

Run = Callable[..., CommandResult]


# What a command is given.


def test_files_last_and_the_working_directory_does_not(run: Run) -> None:
    assert run("mkdir sub; cd sub; echo hi > file; export A=1").exit_code == 0
    result = run("pwd; cat sub/file; echo [$A]")
    assert result.output == "/app\nhi\n[]\n"


def test_both_streams_come_in_order_with_the_exit_code(run: Run) -> None:
    result = run("echo one; echo two >&2; echo three; exit 7")
    assert (result.output, result.exit_code, result.limit) == ("one\ntwo\nthree\n", 7, "")


def test_a_signal_is_an_exit_code(run: Run) -> None:
    result = run("kill -TERM $$")
    assert (result.exit_code, result.output) == (128 + signal.SIGTERM, "")


def test_input_is_empty(run: Run) -> None:
    assert run("cat; read x || echo end").output == "end\n"


def test_permissions_hold_for_the_agent(run: Run) -> None:
    result = run("id -u; echo s > f; chmod 000 f; cat f; chmod 640 f; stat -c %a f; cat f")
    assert result.output == "1000\ncat: f: Permission denied\n640\ns\n"


def test_usual_places_can_be_written(run: Run) -> None:
    result = run("for d in /app /tmp ~ /dev/shm; do echo x > $d/file && cat $d/file; done; cd ~; pwd; git --version")
    assert result.output.startswith("x\nx\nx\nx\n/home/agent\ngit version")


def test_links_through_alternatives_work(run: Run) -> None:
    assert run("echo a b | awk '{print $2}'").output == "b\n"


# What a command can't reach.


def test_the_host_is_invisible(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("s3cret")
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    repository = Path(thundersyncrl.__file__).parents[1]
    hidden = [
        repository,
        tmp_path,
        "/root",
        "/etc/shadow",
        "/etc/hostname",
        "/sys",
        "/var",
        "/run",
        "/opt",
        "/srv",
        "/mnt",
    ]
    result = run("; ".join(f"ls -d {path} 2>&1" for path in hidden))
    assert result.output.count("No such file or directory") == len(hidden)
    assert run("ls /home /tmp").output == "/home:\nagent\n\n/tmp:\n"
    seen = run("env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; cat /etc/passwd").output
    assert "s3cret" not in seen
    assert "SECRET_TOKEN" not in seen
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST"):
        assert name not in seen


def test_only_the_commands_own_processes_are_visible(run: Run) -> None:
    assert int(run("ls -d /proc/[0-9]* | wc -l").output) <= 6


def test_no_file_descriptor_of_ours_is_open(run: Run) -> None:
    assert run("ls /proc/self/fd | wc -l; ls /proc/1/fd | sort -n | tail -1").output.split()[0] == "4"


def test_there_is_no_network(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert socket.create_connection(("127.0.0.1", port), timeout=5).close() is None
        result = run(f"(echo > /dev/tcp/127.0.0.1/{port}) 2>&1 && echo reached; tail -n +3 /proc/net/dev | cut -d: -f1")
    assert "refused" in result.output
    assert "reached" not in result.output
    assert result.output.split()[-1] == "lo"


def test_the_system_cannot_be_written(run: Run) -> None:
    places = ["/x", "/usr/x", "/etc/x", "/dev/x", "/etc/passwd", "/proc/sys/kernel/hostname", "/tests", "/logs"]
    result = run("; ".join(f"(echo x > {place}) 2>/dev/null && echo WROTE {place}" for place in places) + "; true")
    assert result.output == ""


def test_no_rights_can_be_gained(run: Run) -> None:
    result = run(
        "unshare -Ur true; mount -t tmpfs x /app; chown 0 /app; grep CapEff /proc/self/status; sudo -n id; su -c id"
    )
    assert "CapEff:\t0000000000000000" in result.output
    assert "uid=0" not in result.output


def test_deleting_everything_leaves_a_world_that_goes_on(run: Run) -> None:
    run("echo x > /app/a; echo y > /tmp/b")
    result = run("rm -rf --no-preserve-root --one-file-system /app /tmp /home /etc /dev /proc/self /bin")
    assert result.limit == ""
    assert run("ls -A /app /tmp; echo alive > /app/new; cat /app/new; cat /etc/hosts | wc -l").output.endswith(
        "alive\n1\n"
    )
    assert Path("/etc/passwd").exists()


@pytest.mark.slow
def test_deleting_from_the_root_leaves_a_world_that_goes_on(run: Run) -> None:
    result = run("rm -rf / --no-preserve-root", wall_s=30.0)
    assert result.exit_code != 0
    assert run("echo alive").output == "alive\n"


# Limits.


def test_wall_time_kills_and_is_named(run: Run) -> None:
    started = time.monotonic()
    result = run("echo before; setsid nohup sleep 60 & (setsid sleep 60 &); sleep 60", wall_s=0.4)
    assert (result.limit, result.was_killed, result.timed_out, result.exit_code) == ("wall", True, True, 137)
    assert result.output == "before\n"
    assert time.monotonic() - started < 10
    assert own_descendants() == {}


@pytest.mark.parametrize(
    "command", ["sleep 60 & echo done", "sleep 60 >/dev/null & echo done", "setsid sleep 60 & echo done"]
)
def test_a_background_child_keeps_nobody_waiting(run: Run, command: str) -> None:
    """Case H-18."""
    started = time.monotonic()
    result = run(command)
    assert (result.output, result.exit_code, result.limit) == ("done\n", 0, "")
    assert time.monotonic() - started < 2
    assert own_descendants() == {}


def test_cpu_time_is_limited(run: Run) -> None:
    result = run("while :; do :; done", cpu_s=1.0)
    assert result.limit == "cpu"
    assert result.duration_s < 15


def test_cpu_time_of_all_processes_together_is_limited(isolation: Isolation, run: Run) -> None:
    if "cpuacct" not in isolation.controllers:
        pytest.skip("without control groups CPU time is counted for each process")
    result = run("for i in 1 2 3; do (while :; do :; done) & done; wait", cpu_s=1.0)
    assert (result.limit, result.was_killed) == ("cpu", True)


def test_memory_is_limited(isolation: Isolation, run: Run) -> None:
    result = run("python3 -c 'b = bytearray(600 << 20); print(7 * 191)'; echo after")
    assert "1337" not in result.output
    assert result.output.endswith("after\n")
    if "memory" in isolation.controllers:
        assert result.limit == "memory"
    else:
        assert "MemoryError" in result.output


def test_a_fork_bomb_is_refused_and_ended(isolation: Isolation, run: Run) -> None:
    result = run("bomb() { bomb | bomb & }; bomb; sleep 0.5; echo survived", output_chars=100_000)
    assert "Resource temporarily unavailable" in result.output
    if "pids" in isolation.controllers:
        assert result.limit == "processes"
    assert own_descendants() == {}
    assert run("echo next").output == "next\n"


def test_the_disk_is_limited_in_one_file(run: Run) -> None:
    result = run("dd if=/dev/zero of=big bs=1M count=40 2>/dev/null; exit $?")
    assert result.limit == "disk"
    assert result.exit_code != 0
    run("rm -f big")
    assert run("echo x > small; cat small").output == "x\n"


def test_the_disk_is_limited_over_many_files(run: Run) -> None:
    result = run("for i in $(seq 1 60); do head -c 1000000 /dev/zero > f$i || exit 1; sleep 0.02; done")
    assert result.limit == "disk"


def test_a_flood_of_output_is_cut_and_the_command_goes_on(run: Run) -> None:
    """Case H-31."""
    result = run("seq 1 2000000; echo FAIL_MARK; exit 3")
    assert (result.exit_code, result.limit) == (3, "")
    assert result.output.startswith("1\n2\n3\n")
    assert result.output.endswith("FAIL_MARK\n")
    assert len(result.output) < 2100
    assert f"[{result.num_bytes - 2000} characters left out]" in result.output
    assert result.num_bytes_dropped > 14_000_000


def test_a_hundred_megabytes_are_read_to_the_end(run: Run) -> None:
    result = run("head -c 100000000 /dev/zero; echo end")
    assert (result.num_bytes, result.exit_code, result.limit) == (100_000_004, 0, "")
    assert result.output.endswith("end\n")


def test_output_without_end_is_killed(run: Run) -> None:
    result = run("yes", max_output_bytes=20_000_000)
    assert (result.limit, result.was_killed) == ("output", True)


@pytest.mark.parametrize("where", ["", " >&2"])
def test_invalid_bytes_are_shown(run: Run, where: str) -> None:
    """Case H-30."""
    assert run(f"printf 'a\\xf0b'{where}").output == "a\ufffdb"


def test_nothing_can_kill_the_world_from_inside(run: Run) -> None:
    assert run("kill -9 1; kill -9 -1; echo still").output.endswith("still\n")


def test_killed_children_leave_no_zombies(isolation: Isolation, limits: Limits) -> None:
    """Case H-17."""

    async def many() -> list[CommandResult]:
        worlds = [Sandbox(isolation, limits=limits) for _ in range(4)]
        for world in worlds:
            world.open()

        async def five(world: Sandbox) -> list[CommandResult]:
            return [await world.run("sleep 60", limits=limits.at_most(wall_s=0.2)) for _ in range(5)]

        results = await asyncio.gather(*map(five, worlds))
        for world in worlds:
            world.close()
        return [result for some in results for result in some]

    results = asyncio.run(many())
    assert [result.limit for result in results] == ["wall"] * 20
    assert own_descendants() == {}


# Ends.


def test_a_cancelled_command_leaves_nothing(isolation: Isolation, limits: Limits) -> None:
    """Case H-29, from inside."""

    async def cancelled() -> list[Path]:
        worlds = [Sandbox(isolation, limits=limits) for _ in range(4)]
        for world in worlds:
            world.open()
        running = [asyncio.create_task(world.run("sleep 300", limits=limits)) for world in worlds]
        await asyncio.sleep(0.3)
        assert len(own_descendants()) >= 4
        for task in running:
            task.cancel()
        assert all(
            isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*running, return_exceptions=True)
        )
        assert own_descendants() == {}
        folders = [world.place("/") for world in worlds]
        for world in worlds:
            world.close()
        return folders

    assert not any(folder.exists() for folder in asyncio.run(cancelled()))


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.008, 0.012])
def test_a_command_can_be_cancelled_while_it_is_built(sandbox: Sandbox, limits: Limits, delay_s: float) -> None:
    async def cancelled() -> None:
        running = asyncio.create_task(sandbox.run("sleep 300", limits=limits))
        await asyncio.sleep(delay_s)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert own_descendants() == {}


def test_closing_removes_files_and_groups(isolation: Isolation, limits: Limits) -> None:
    world = Sandbox(isolation, limits=limits)
    world.open()
    asyncio.run(world.run("mkdir -p a/b; touch a/b/c; chmod -R 000 a", limits=limits))
    folder, name = world.place("/"), world.place("/").parent.name
    world.close()
    world.close()
    assert not folder.exists()
    groups = [parent / f"{storage.current().name}-{name}" for parent in isolation.controllers.parents.values()]
    assert not any(group.exists() for group in groups)
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()


PARENT = """
import asyncio, sys
from thundersyncrl.config import EnvironmentConfig
from thundersyncrl.environments.isolation import detect
from thundersyncrl.environments.limits import Limits
from thundersyncrl.environments.sandbox import Sandbox

async def main():
    limits = Limits.from_settings(EnvironmentConfig(command_limit_s=300.0))
    world = Sandbox(detect(), limits=limits)
    world.open()
    print(world.place("/").parent.parent, flush=True)
    command = f"(setsid sleep {sys.argv[1]} &); exec -a {sys.argv[1]} sleep 300"
    running = asyncio.create_task(world.run(command, limits=limits))
    await asyncio.sleep(float(sys.argv[2]))

asyncio.run(main())
"""


def test_a_killed_parent_leaves_no_process_and_its_files_are_removed_later() -> None:
    marker = f"3{os.getpid()}77"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, marker, "300"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    folder = Path(parent.stdout.readline().strip())
    _until(lambda: len(processes_with(marker)) >= 4)  # the parent, bubblewrap and both sleepers
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    _until(lambda: not processes_with(marker))
    remove_abandoned()
    assert not folder.exists()
    assert _groups_of(folder.name) == []


def _groups_of(name: str) -> list[Path]:
    return [group for parent in detect().controllers.parents.values() for group in parent.glob(f"{name}*")]


def test_a_parent_that_forgets_to_close_leaves_nothing_at_its_exit() -> None:
    marker = f"4{os.getpid()}77"
    done = subprocess.run([sys.executable, "-c", PARENT, marker, "0.5"], stdout=subprocess.PIPE, text=True, timeout=60)
    folder = Path(done.stdout.strip())
    assert (done.returncode, folder.exists(), _groups_of(folder.name)) == (0, False, [])
    assert processes_with(marker) == []


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, "waited 10 s in vain"
        time.sleep(0.02)


# Calls out of order, and worlds that can't be built.


def test_a_sandbox_is_used_once_and_by_one_command_at_a_time(limits: Limits) -> None:
    async def misuse() -> None:
        world = Sandbox(detect(), limits=limits)
        with pytest.raises(PhaseError, match="isn't open"):
            await world.run("true", limits=limits)
        world.open()
        running = asyncio.create_task(world.run("sleep 5", limits=limits))
        await asyncio.sleep(0.1)
        with pytest.raises(PhaseError, match="runs a command already"):
            await world.run("true", limits=limits)
        await world.stop()
        assert (await running).exit_code == 137
        world.close()
        with pytest.raises(PhaseError, match="isn't open"):
            await world.run("true", limits=limits)
        with pytest.raises(PhaseError, match="opened before"):
            world.open()

    asyncio.run(misuse())


def test_a_sandbox_that_cannot_be_built_is_not_a_commands_failure(limits: Limits) -> None:
    world = Sandbox(detect(), limits=limits)
    world.open()
    mount = Mount(source=Path("/no/such/folder"), target="/data")
    with pytest.raises(EnvironmentFailure, match="no/such/folder"):
        asyncio.run(world.run("true", limits=limits, mounts=(mount,)))
    world.close()


def test_a_program_that_is_missing_is_an_environment_failure(limits: Limits) -> None:
    world = Sandbox(dataclasses.replace(detect(), setpriv=Path("/no/setpriv")), limits=limits)
    world.open()
    with pytest.raises(EnvironmentFailure, match="setpriv"):
        asyncio.run(world.run("true", limits=limits))
    world.close()
    assert own_descendants() == {}


def test_a_world_that_cannot_be_made_says_so(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "mount_tmpfs", lambda *args, **keywords: False)
    world = Sandbox(dataclasses.replace(detect(), has_tmpfs=True), limits=limits)
    with pytest.raises(EnvironmentFailure, match="could not be mounted"):
        world.open()


def test_odd_characters_reach_the_command(run: Run) -> None:
    assert run("echo 'é 漢 \"quoted\" $HOME'").output == 'é 漢 "quoted" $HOME\n'
    assert run("echo '\ud800'").output == "?\n"


def test_our_own_user_serves_where_another_cannot_be_had(limits: Limits) -> None:
    world = Sandbox(dataclasses.replace(detect(), outer_uid=os.getuid()), limits=limits)
    world.open()
    command = "id -u; echo s > f; chmod 000 f; cat f; echo x > /usr/x; grep CapEff /proc/self/status"
    result = asyncio.run(world.run(command, limits=limits))
    world.close()
    lines = result.output.splitlines()
    assert lines[0] == "1000"
    assert "cat: f: Permission denied" in lines
    assert any("/usr/x: Read-only file system" in line for line in lines)
    assert lines[-1] == "CapEff:\t0000000000000000"
