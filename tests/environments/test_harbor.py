"""Task folders are read whole, and what can't work is refused before anything runs."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from tests.environments.builders import TASK_TOML, write_task
from thundersyncrl.environments.dockerfile import Copy
from thundersyncrl.environments.harbor import load_task, load_tasks, read_task
from thundersyncrl.errors import TaskError
from thundersyncrl.records import Task


def test_a_folder_becomes_a_task(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "count-3", toml=TASK_TOML.replace("several_turns = false", "several_turns = true"))
    assert load_task(folder) == Task(
        id="count-3",
        instruction="Write hello into /app/out.txt",
        folder=folder,
        kind="files",
        difficulty="easy",
        several_turns=True,
    )


FULL = """schema_version = "1.4"
[task]
name = "somebody/something"
[metadata]
category = "git"
anything = { nested = [1, 2] }
[agent]
timeout_sec = 90
[verifier]
timeout_sec = 12.5
env = { MODE = "strict" }
environment_mode = "shared"
[solution]
env = { ANSWER = "42" }
[environment]
cpus = 2
memory_mb = 256
storage_mb = 32
network_mode = "no-network"
workdir = "/data/work"
env = { EXTRA = "1" }
gpus = 0
mcp_servers = []
os = "linux"
"""


def test_everything_that_a_folder_says_is_kept(tmp_path: Path) -> None:
    folder = write_task(
        tmp_path / "full", toml=FULL, dockerfile="FROM debian\nENV A=b\nCOPY x /srv/\n", files={"x": "1"}
    )
    found = read_task(folder)
    assert (found.kind, found.workdir, found.top_folders) == ("git", "/data/work", ("/srv", "/data"))
    assert (found.agent_limit_s, found.verifier_limit_s) == (90.0, 12.5)
    assert (found.memory_bytes, found.disk_bytes) == (256 << 20, 32 << 20)
    assert found.variables == {"A": "b", "EXTRA": "1"}
    assert (found.verifier_variables, found.solution_variables) == ({"MODE": "strict"}, {"ANSWER": "42"})
    assert found.copies == (Copy(source=folder / "environment/x", target="/srv/x"),)


def test_older_spellings_are_read(tmp_path: Path) -> None:
    toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    found = read_task(write_task(tmp_path / "old", toml=toml))
    assert (found.memory_bytes, found.disk_bytes) == (2 << 30, 512 << 20)
    assert (found.agent_limit_s, found.verifier_limit_s) == (math.inf, math.inf)


def test_without_a_dockerfile_the_folders_files_lie_in_app(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "plain", files={"notes.txt": "x"})
    (folder / "environment/Dockerfile").unlink()
    found = read_task(folder)
    assert (found.workdir, found.copies) == ("/app", (Copy(source=folder / "environment", target="/app"),))


@pytest.mark.parametrize("part", ["task.toml", "instruction.md", "environment", "tests/test.sh"])
def test_a_missing_part_is_named(tmp_path: Path, part: str) -> None:
    folder = write_task(tmp_path / "task")
    path = folder / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(TaskError, match=rf"`{part}`.*{folder}"):
        load_task(folder)
    with pytest.raises(TaskError, match=f"`{part}`"):
        load_tasks(tmp_path)


@pytest.mark.parametrize(
    ("toml", "reason"),
    [
        ("schema_version = ", "expected TOML"),
        ('schema_version = "2.0"', "`schema_version` 1.x"),
        ("[environment]\ngpus = 1", "`environment.gpus` to be no `gpus`.*GPU"),
        ('[environment]\nnetwork_mode = "public"', "`environment.network_mode`.*no network"),
        ('[agent]\nnetwork_mode = "allowlist"', "`agent.network_mode`"),
        ("[environment]\nallow_internet = true", "`environment.allow_internet`"),
        ('[environment]\nos = "windows"', "`environment.os`"),
        ('[environment]\ndocker_image = "postgres:16"', "`environment.docker_image`.*plain image"),
        ('[[environment.mcp_servers]]\nname = "x"', "`environment.mcp_servers`.*tool servers"),
        ('[environment.healthcheck]\ncommand = "x"', "`environment.healthcheck`"),
        ("[environment]\nprivileged = true", "`environment.privileged`"),
        ('[agent]\nuser = "root"', "`agent.user`"),
        ('[verifier]\nenvironment_mode = "separate"', "`verifier.environment_mode`"),
        ('[verifier.env]\nKEY = "${API_KEY}"', "`verifier.env`.*this machine's variables.*`KEY`"),
        ("[verifier.env]\nN = 1", "`verifier.env` to be texts"),
        ('[[steps]]\nname = "one"', "`steps`.*several steps"),
        ('[environment]\nmemory_mb = "much"', "`environment.memory_mb`.*positive number"),
        ('[environment]\nmemory = "much"', "`environment.memory`.*a size"),
        ("[verifier]\ntimeout_sec = 0", "`verifier.timeout_sec`"),
        ("[agent]\ntimeout_sec = nan", "`agent.timeout_sec`"),
        ('[metadata]\nseveral_turns = "yes"', "`metadata.several_turns`.*true or false"),
        ("metadata = 3", "`metadata` to be a table"),
        ('[environment]\nworkdir = "/usr/src"', "'/usr/src'"),
        ('[environment]\nworkdir = "app"', r"`environment.workdir`.*absolute path"),
        ('[environment]\nworkdir = "/app/../../../x"', r"`environment.workdir`.*without `\.\.`"),
        ('[environment]\nworkdir = "/app/\\u0000"', "`environment.workdir`"),
        ("[environment]\nstorage_mb = 1e-9", "`environment.storage_mb`.*one megabyte"),
        ('[environment]\nstorage = "0G"', "`environment.storage`.*one megabyte"),
        ('[environment]\nmemory = "-5G"', "`environment.memory`.*one megabyte"),
        ('[environment]\nmemory = "nanG"', "`environment.memory`.*one megabyte"),
        pytest.param(f"[agent]\ntimeout_sec = {'9' * 400}", "`agent.timeout_sec`", id="400 digits"),
        pytest.param(f"[agent]\ntimeout_sec = {'9' * 5000}", "expected TOML", id="5000 digits"),
        pytest.param(f"x = {'[' * 20000}", "expected TOML", id="deep"),
        ('[environment.env]\n"A=B" = "1"', "`environment.env`.*`A=B`"),
        ('[environment.env]\n"" = "1"', "`environment.env`"),
        ('[verifier.env]\nA = "\\u0000"', "`verifier.env`.*`A`"),
    ],
)
def test_what_a_sandbox_cannot_give_is_refused_before_the_run(tmp_path: Path, toml: str, reason: str) -> None:
    folder = write_task(tmp_path / "task", toml=toml + "\n")
    if "docker_image" in toml:
        (folder / "environment/Dockerfile").unlink()
    with pytest.raises(TaskError, match=reason):
        load_task(folder)


@pytest.mark.parametrize("name", ["docker-compose.yaml", "compose.yml", ".dockerignore"])
def test_services_and_ignore_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError, match=name):
        load_task(write_task(tmp_path / "task", files={name: "x"}))


@pytest.mark.parametrize("target", ["/tests/", "/logs/verifier/reward.txt", "/solution/", "/etc/passwd", "/usr/bin/x"])
def test_a_task_cannot_put_files_where_the_system_or_the_verifier_has_its_own(tmp_path: Path, target: str) -> None:
    with pytest.raises(TaskError, match="keeps these"):
        load_task(write_task(tmp_path / "task", dockerfile=f"FROM debian\nCOPY x {target}\n", files={"x": "1"}))


@pytest.mark.parametrize("line", ["COPY x .", "COPY x /data", "COPY . /"])
def test_files_cannot_be_copied_to_the_root(tmp_path: Path, line: str) -> None:
    with pytest.raises(TaskError, match="into a folder"):
        load_task(write_task(tmp_path / "task", dockerfile=f"FROM debian\n{line}\n", files={"x": "1"}))


def test_a_line_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"`VOLUME /data`.*line 2"):
        load_task(write_task(tmp_path / "task", dockerfile="FROM debian\nVOLUME /data\n"))


@pytest.mark.parametrize("content", [b"", b"  \n", b"caf\xe9"])
def test_an_unreadable_or_empty_instruction_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_task(tmp_path / "task")
    (folder / "instruction.md").write_bytes(content)
    with pytest.raises(TaskError, match=r"instruction\.md"):
        load_task(folder)


def test_tasks_come_sorted_from_nested_folders_and_by_kind(tmp_path: Path) -> None:
    for name, kind in (("z/c", "git"), ("a", "csv"), ("y/b", "csv")):
        write_task(tmp_path / name, toml=TASK_TOML.replace('"files"', f'"{kind}"'))
    (tmp_path / "README.md").touch()
    (tmp_path / ".git/hooks").mkdir(parents=True)
    assert [task.id for task in load_tasks(tmp_path)] == ["a", "b", "c"]
    assert [task.id for task in load_tasks(tmp_path, kinds=["csv"])] == ["a", "b"]
    with pytest.raises(TaskError, match=r"'cvs'.*tasks\.kinds"):
        load_tasks(tmp_path, kinds=["cvs"])


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    write_task(tmp_path / "x/one")
    for name in ("back", "again"):
        (tmp_path / "x" / name).symlink_to(tmp_path)
    assert [task.id for task in load_tasks(tmp_path)] == ["one"]


def test_an_environment_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    shutil.rmtree(folder / "environment")
    (folder / "environment").symlink_to("/etc")
    with pytest.raises(TaskError, match="a link out of it"):
        load_task(folder)


def test_two_tasks_with_one_id_are_refused(tmp_path: Path) -> None:
    write_task(tmp_path / "x/same")
    write_task(tmp_path / "y/same")
    with pytest.raises(TaskError, match=r"unique.*'same'"):
        load_tasks(tmp_path)


def test_no_tasks_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="got none below"):
        load_tasks(tmp_path)
    with pytest.raises(TaskError, match="got none at"):
        load_tasks(tmp_path / "missing")
    with pytest.raises(TaskError, match="got none at"):
        load_tasks(tmp_path / ("x" * 5000))
