"""The shell environment: acts become observations, the world gets a verdict, and cheating gets none."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.environments.builders import TASK_TOML, children, own_descendants, write_task
from thundersyncrl.config import EnvironmentConfig
from thundersyncrl.environments import shell
from thundersyncrl.environments.environment import Observation
from thundersyncrl.environments.harbor import load_task
from thundersyncrl.environments.isolation import Isolation
from thundersyncrl.environments.shell import (
    ShellEnvironment,
    check_sandbox,
    run_nothing,
    run_oracle,
    shell_environments,
)
from thundersyncrl.errors import (
    EnvironmentFailure,
    PhaseError,
    TaskError,
    TimeLimitError,
    ToolError,
    VerifierError,
)
from thundersyncrl.records import Reward, Task

pytestmark = pytest.mark.sandbox

SETTINGS = EnvironmentConfig(command_limit_s=10.0, verifier_limit_s=20.0, memory_mb=128, disk_mb=8, output_chars=200)

Script = Callable[[ShellEnvironment], Awaitable[object]]


def play(folder: Path, script: Script, settings: EnvironmentConfig = SETTINGS, **keywords: Isolation) -> object:
    """Open the task's world, run the script on it, close it, and return what the script returned."""

    async def whole() -> object:
        environment = ShellEnvironment(load_task(folder), settings, asyncio.Semaphore(4), **keywords)
        try:
            await environment.open()
            return await script(environment)
        finally:
            await environment.close()
            assert own_descendants() == {}

    return asyncio.run(whole())


def act(folder: Path, *replies: str, settings: EnvironmentConfig = SETTINGS) -> list[Observation]:
    async def script(environment: ShellEnvironment) -> list[Observation]:
        return [await environment.act(reply) for reply in replies]

    found = play(folder, script, settings)
    assert isinstance(found, list)
    return found


def graded(folder: Path, *commands: str, settings: EnvironmentConfig = SETTINGS, **keywords: Isolation) -> Reward:
    async def script(environment: ShellEnvironment) -> Reward:
        for command in commands:
            await environment.act(block(command))
        return await environment.grade()

    found = play(folder, script, settings, **keywords)
    assert isinstance(found, Reward)
    return found


def block(command: str) -> str:
    return f"```bash\n{command}\n```"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path / "hello")


# Acting.


def test_a_command_is_shown_its_output_and_the_world_goes_on(task: Path) -> None:
    first, second, third = act(task, block("echo hi > a; ls"), block("cat a; exit 2"), block("true"))
    assert (first.text, first.done, first.is_malformed) == ("a", False, False)
    assert second.text == "hi\n[exit code 2]"
    assert second.metrics["exit_code"] == 2.0
    assert third.text == "(no output)"
    assert third.metrics["tool_s"] > 0


def test_done_below_a_block_runs_it_and_ends(task: Path) -> None:
    async def script(environment: ShellEnvironment) -> tuple[Observation, Reward]:
        return await environment.act(block("echo hello > out.txt") + "\nDONE"), await environment.grade()

    observation, reward = play(task, script)  # type: ignore[misc]
    assert (observation.text, observation.done) == ("", True)
    assert reward == Reward(value=1.0)


def test_done_alone_ends(task: Path) -> None:
    assert act(task, "DONE") == [Observation(text="", done=True)]


def test_a_malformed_reply_runs_nothing_and_the_next_turn_goes_on(task: Path) -> None:
    """Case H-06."""
    broken = '<tool_call>{"name": "bash", "arguments": {"cmd": "touch ran"}</tool_call>'
    cut = '<tool_call>{"name": "bash", "arguments": {"cmd": "touch ra'
    first, second, third = act(task, broken, cut, block("ls"))
    for observation in (first, second):
        assert observation.is_malformed
        assert not observation.done
        assert observation.metrics == {"num_malformed": 1.0}
        assert "Expected one ```bash block" in observation.text
    assert third.text == "(no output)"
    assert not third.is_malformed


def test_only_the_first_block_is_run_and_the_agent_is_told(task: Path) -> None:
    first, second = act(task, block("echo one") + "\n" + block("touch two"), block("ls"))
    assert first.text == "one\n[only the first block was run]"
    assert second.text == "(no output)"


def test_limits_are_told_to_the_agent(task: Path) -> None:
    settings = SETTINGS.model_copy(update={"command_limit_s": 0.5})
    slow, full, after = act(
        task, block("echo a; sleep 60"), block("head -c 20000000 /dev/zero > big"), block("rm big"), settings=settings
    )
    assert slow.text == "a\n[killed after 0.5 s]"
    assert slow.metrics["num_wall_limits"] == 1.0
    assert "[disk full: 8 MB]" in full.text
    assert after.text == "(no output)"


def test_a_tasks_own_smaller_limit_wins(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "quick", toml=TASK_TOML + "[agent]\ntimeout_sec = 0.5\n")
    assert act(folder, block("sleep 60"))[0].text == "(no output)\n[killed after 0.5 s]"


def test_long_output_is_cut_in_the_middle(task: Path) -> None:
    """Case H-31."""
    observation = act(task, block("seq 1 2000000; echo FAIL_MARK; exit 3"))[0]
    assert len(observation.text) < 300
    assert observation.text.startswith("1\n2\n3\n")
    assert observation.text.endswith("FAIL_MARK\n[exit code 3]")
    assert "characters left out]" in observation.text


def test_a_command_that_cannot_be_passed_on_is_malformed(task: Path) -> None:
    assert act(task, block("echo a\0b"))[0].is_malformed


@pytest.mark.parametrize("spoil", ["chmod 000 /app/desk", "rm -rf /app/desk", "rm -rf /app/desk; touch /app/desk"])
def test_a_working_folder_that_the_agent_spoilt_is_told_and_still_graded(tmp_path: Path, spoil: str) -> None:
    folder = write_task(tmp_path / "spoilt", dockerfile="FROM debian\nWORKDIR /app/desk\n")
    first, second = act(folder, block(spoil), block("pwd"))
    assert first.text == "(no output)"
    assert "cd: /app/desk: " in second.text
    assert second.text.endswith("\n/")


def test_the_system_prompt_is_short_and_says_all(task: Path) -> None:
    prompt = ShellEnvironment(load_task(task), SETTINGS, asyncio.Semaphore(1)).system_prompt
    assert len(prompt.split()) < 40
    for word in ("/app", "```bash", "DONE"):
        assert word in prompt


# The world.


def test_the_task_files_are_the_agents_own(tmp_path: Path) -> None:
    folder = write_task(
        tmp_path / "files",
        dockerfile="FROM debian:12\nENV WHO=world\nWORKDIR /app/src\nCOPY code/ .\n"
        "COPY one.txt /data/\nCOPY one.txt /data/two\nRUN mkdir -p /app/empty\n",
        files={"code/deep/a.py": "print(1)\n", "one.txt": "1"},
    )
    (folder / "environment/code/deep/a.py").chmod(0o640)
    (folder / "environment/code/link").symlink_to("deep/a.py")
    observations = act(
        folder,
        block("pwd; echo $WHO; find . -type f -o -type l | sort; stat -c '%a %U' deep/a.py; readlink link"),
        block("echo more >> deep/a.py && tail -1 deep/a.py; ls -d /app/empty; ls /data"),
    )
    assert observations[0].text == "/app/src\nworld\n./deep/a.py\n./link\n640 agent\ndeep/a.py"
    assert observations[1].text.startswith("more\n/app/empty\none.txt\ntwo")


def test_the_tasks_tests_and_solution_are_hidden_from_the_agent(task: Path) -> None:
    text = act(task, block("ls -d /tests /solution /logs 2>&1; find / -name test.sh -o -name solve.sh 2>/dev/null"))[
        0
    ].text
    assert text.count("No such file") == 3
    assert "test.sh\n" not in text
    assert "solve.sh\n" not in text


def test_files_that_do_not_fit_are_an_environment_failure(tmp_path: Path) -> None:
    folder = write_task(
        tmp_path / "big", dockerfile="FROM debian\nWORKDIR /app\nCOPY big .\n", files={"big": "x" * (9 << 20)}
    )
    if "tmpfs" not in check_sandbox():
        pytest.skip("this machine lets us mount nothing; the size is measured while a command runs")
    with pytest.raises(EnvironmentFailure, match=r"environment\.disk_mb"):
        act(folder)


def test_a_task_without_a_folder_is_refused() -> None:
    with pytest.raises(TaskError, match="without"):
        ShellEnvironment(Task(id="x", instruction="y"), SETTINGS, asyncio.Semaphore(1))


# Verdicts.


def test_the_oracle_gets_one_and_doing_nothing_zero(task: Path, isolation: Isolation) -> None:
    assert asyncio.run(run_oracle(load_task(task), SETTINGS)) == Reward(value=1.0)
    assert asyncio.run(run_nothing(load_task(task), SETTINGS)) == Reward(value=0.0)
    assert graded(task, "echo hello > out.txt", isolation=isolation) == Reward(value=1.0)
    assert graded(task, "echo other > out.txt", isolation=isolation) == Reward(value=0.0)


def test_an_oracle_that_fails_or_is_missing_says_so(tmp_path: Path) -> None:
    failing = load_task(write_task(tmp_path / "failing", solution="echo broken; exit 4\n"))
    with pytest.raises(ToolError, match=r"exit code 4.*broken"):
        asyncio.run(run_oracle(failing, SETTINGS))
    folder = write_task(tmp_path / "missing")
    (folder / "solution/solve.sh").unlink()
    with pytest.raises(TaskError, match=r"solution/solve\.sh"):
        asyncio.run(run_oracle(load_task(folder), SETTINGS))


def test_variables_reach_those_they_are_for(tmp_path: Path) -> None:
    folder = write_task(
        tmp_path / "variables",
        toml=TASK_TOML + '[verifier.env]\nWANTED = "42"\n[solution.env]\nANSWER = "42"\n',
        solution='echo "$ANSWER$WANTED" > out.txt\n',
        verifier='[ "$(cat out.txt)" = "$WANTED" ] && [ -z "$ANSWER" ] && echo 1 > /logs/verifier/reward.txt',
    )
    assert asyncio.run(run_oracle(load_task(folder), SETTINGS)) == Reward(value=1.0)


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        ("exit 1", "got neither.*exit code 1"),
        ("echo ValueError: bad input >&2; exit 3", "got neither.*exit code 3.*ValueError: bad input"),
        ("echo nan > /logs/verifier/reward.txt", "'nan"),
        ("echo passed > /logs/verifier/reward.txt", "'passed"),
        ("touch /logs/verifier/reward.txt", "finite number"),
        ("ln -s /app/one /logs/verifier/reward.txt", "plain writable file"),
        ("ln -s /etc/passwd /logs/verifier/reward.json", "plain writable file"),
        ("mkfifo /logs/verifier/reward.txt", "plain writable file"),
        ("echo '{\"a\": NaN}' > /logs/verifier/reward.json", "finite number"),
        ("echo 1 > /logs/reward.txt || true", "got neither"),
    ],
)
def test_no_verdict_is_an_error_and_never_zero(tmp_path: Path, verifier: str, reason: str) -> None:
    """Case H-16."""
    folder = write_task(tmp_path / "task", verifier=verifier)
    with pytest.raises(VerifierError, match=f"(?s){reason}"):
        graded(folder, "echo 1 > one")


def test_several_named_rewards_are_kept(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", verifier='echo \'{"tests": 1, "style": 0.5}\' > /logs/verifier/reward.json')
    assert graded(folder) == Reward(value=0.75, components={"tests": 1.0, "style": 0.5})


def test_a_verifier_that_never_returns_costs_only_its_own_verdict(tmp_path: Path) -> None:
    """Case H-15."""
    good = load_task(write_task(tmp_path / "good"))
    hangs = load_task(write_task(tmp_path / "hangs", verifier="while true; do :; done"))
    settings = SETTINGS.model_copy(update={"verifier_limit_s": 1.0, "max_open": 8})

    async def grade(make: Callable[[Task], ShellEnvironment], task: Task) -> Reward:
        environment = make(task)
        try:
            await environment.open()
            return await environment.grade()
        finally:
            await environment.close()

    async def eight() -> list[Reward | BaseException]:
        make = shell_environments(settings)
        tasks = [*[good] * 3, hangs, *[good] * 4]
        return await asyncio.gather(*(grade(make, task) for task in tasks), return_exceptions=True)  # type: ignore[arg-type]

    started = time.monotonic()
    results = asyncio.run(eight())
    assert time.monotonic() - started < 15
    assert isinstance(results[3], TimeLimitError)
    assert "verifier" in str(results[3])
    assert [result for number, result in enumerate(results) if number != 3] == [Reward(value=0.0)] * 7
    assert own_descendants() == {}


# Cheating.


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "ln -s /tmp /logs; ln -s /tmp /tests; echo 1 > /tmp/reward.txt",
        "mkdir -p /app/logs/verifier; echo 1 > /app/logs/verifier/reward.txt",
        "(while :; do echo 1 > /logs/verifier/reward.txt; done) & setsid sleep 60 & disown -a",
        "printf 'cat() { echo hello; }\\n' | tee ~/.bashrc ~/.profile > /tmp/env; export BASH_ENV=/tmp/env",
        "printf '#!/bin/sh\\necho hello\\n' > cat; chmod +x cat; mkdir ~/bin; cp cat ~/bin",
    ],
)  # fmt: skip
def test_tampering_before_grading_gets_zero(task: Path, command: str) -> None:
    assert graded(task, command) == Reward(value=0.0)


def test_a_full_disk_does_not_prevent_a_verdict(tmp_path: Path) -> None:
    verifier = "for f in /tmp/w /app/w; do echo w > $f && cat $f || exit 1; done; echo 0 > /logs/verifier/reward.txt"
    folder = write_task(tmp_path / "task", verifier=verifier)
    assert graded(folder, "head -c 20000000 /dev/zero > /tmp/fill") == Reward(value=0.0)


def test_a_full_table_of_files_does_not_prevent_a_verdict(tmp_path: Path) -> None:
    verifier = "echo work > /tmp/work && echo 0 > /logs/verifier/reward.txt"
    folder = write_task(tmp_path / "task", verifier=verifier)
    assert graded(folder, "seq -f /app/f%g 1 20000 | xargs touch") == Reward(value=0.0)


RUNS_THE_AGENTS_PROGRAM = """
bash /app/run.sh
if cmp -s /tests/wanted /app/out.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.mark.parametrize(
    "program",
    [
        "echo mine > /tests/wanted; cp /tests/wanted /tests/x; chmod 777 /tests; echo mine > /app/out.txt",
        "echo 1 > /logs/verifier/reward.txt",
        "mv /tests /old; mkdir /tests; kill -9 1",
    ],
)
def test_the_agents_program_cannot_change_what_the_verifier_compares(tmp_path: Path, program: str) -> None:
    folder = write_task(tmp_path / "task", verifier=RUNS_THE_AGENTS_PROGRAM)
    (folder / "tests/wanted").write_text("secret\n")
    assert graded(folder, f"echo '{program}' > run.sh") == Reward(value=0.0)


@pytest.mark.parametrize(
    "program",
    [
        "echo 1 > /logs/verifier/reward.txt; chmod 444 /logs/verifier/reward.txt",
        "echo 1 > /logs/verifier/reward.txt; chmod 444 /logs/verifier/reward.txt; chmod 555 /logs/verifier",
        "echo 1 > /logs/verifier/reward.json",
        "ln -s /app/one /logs/verifier/reward.txt",
        "kill -9 $PPID",
    ],
)
def test_the_agents_program_cannot_give_itself_the_verdict(tmp_path: Path, program: str) -> None:
    folder = write_task(tmp_path / "task", verifier=RUNS_THE_AGENTS_PROGRAM)
    (folder / "tests/wanted").write_text("secret\n")
    with pytest.raises(VerifierError, match="no verdict"):
        graded(folder, f"echo '{program}' > run.sh; echo 1 > one")


def test_deleting_everything_still_gets_a_verdict(task: Path) -> None:
    command = "rm -rf --no-preserve-root --one-file-system /app /tmp /home /dev/shm"
    assert graded(task, command) == Reward(value=0.0)


# Order, room and ends.


def test_calls_out_of_order_are_refused(task: Path) -> None:
    async def misuse() -> None:
        environment = ShellEnvironment(load_task(task), SETTINGS, asyncio.Semaphore(1))
        with pytest.raises(PhaseError, match="expected an environment that is open, got one that is new"):
            await environment.act("DONE")
        await environment.open()
        with pytest.raises(PhaseError, match="is new, got one that is open"):
            await environment.open()
        await environment.grade()
        for call in (environment.grade, lambda: environment.act("DONE")):
            with pytest.raises(PhaseError, match="got one that is graded"):
                await call()
        await environment.close()
        await environment.close()
        with pytest.raises(PhaseError, match="got one that is closed"):
            await environment.act("DONE")

    asyncio.run(misuse())


def test_an_environment_that_was_never_opened_can_be_closed(task: Path) -> None:
    asyncio.run(ShellEnvironment(load_task(task), SETTINGS, asyncio.Semaphore(1)).close())


def test_waiting_for_room_has_a_limit(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "SLOT_LIMIT_S", 0.2)

    async def crowded() -> None:
        environment = ShellEnvironment(load_task(task), SETTINGS, asyncio.Semaphore(0))
        await environment.open()
        with pytest.raises(TimeLimitError, match=r"room for a command.*environment\.max_open"):
            await environment.act(block("true"))
        await environment.close()

    asyncio.run(crowded())


def test_no_more_commands_than_allowed_run_at_once(task: Path) -> None:
    settings = SETTINGS.model_copy(update={"max_open": 2})

    async def crowd() -> int:
        make = shell_environments(settings)
        environments = [make(load_task(task)) for _ in range(6)]
        for environment in environments:
            await environment.open()
        acts = [asyncio.create_task(environment.act(block("sleep 0.2"))) for environment in environments]
        most = 0
        while not all(task.done() for task in acts):
            most = max(most, len(children(os.getpid())))
            await asyncio.sleep(0.02)
        for environment in environments:
            await environment.close()
        return most

    assert asyncio.run(crowd()) == 2


def test_cancelling_leaves_nothing(task: Path) -> None:
    """Case H-29, from inside."""

    async def cancelled() -> None:
        make = shell_environments(SETTINGS)

        async def live() -> None:
            environment = make(load_task(task))
            try:
                await environment.open()
                await environment.act(block("sleep 300"))
            finally:
                await environment.close()

        running = [asyncio.create_task(live()) for _ in range(4)]
        await asyncio.sleep(0.3)
        for one in running:
            one.cancel()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    asyncio.run(cancelled())
    assert own_descendants() == {}


def test_closing_ends_a_command_that_nobody_waits_for(task: Path) -> None:
    async def left_behind() -> Observation:
        environment = ShellEnvironment(load_task(task), SETTINGS, asyncio.Semaphore(1))
        await environment.open()
        running = asyncio.create_task(environment.act(block("sleep 300")))
        await asyncio.sleep(0.2)
        await environment.close()
        return await running

    assert asyncio.run(left_behind()).metrics["exit_code"] == 137.0
    assert own_descendants() == {}


def test_the_report_says_what_holds_here() -> None:
    assert "network:" in check_sandbox()
