"""The commands: exit codes, what goes to which stream, and refusals before anything heavy is imported."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.observe.records import make_report, make_trajectory
from thundersyncrl.cli import main
from thundersyncrl.config import Config
from thundersyncrl.errors import ConfigError, NumericsError, RolloutError, TaskError
from thundersyncrl.observe.observer import EvaluationResult, Observer
from thundersyncrl.runtime.json_lines import read_lines

Run = Callable[..., tuple[int, str, str]]

SUMMARY = {"pass_rate_before": 0.0, "pass_rate_warm": 0.5, "pass_rate_after": 0.75, "seconds": 1.0}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs the command line in this process; returns exit code, stdout and stderr."""
    monkeypatch.delenv("THUNDERSYNCRL_STARTED_AT", raising=False)
    terminate = signal.getsignal(signal.SIGTERM)

    def run_command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["thundersyncrl", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    yield run_command
    signal.signal(signal.SIGTERM, terminate)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(f'steps = 1\nrun = "{tmp_path / "run"}"\n[warm_start]\n[rollout]\ngroup_size = 4\n')
    return file


def install_build(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Stand in for the factory, whose real parts are a model and an engine."""
    module = ModuleType("thundersyncrl.runs")
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "thundersyncrl.runs", module)


def short_run(config: Config, *, resume: bool, sink: Observer) -> dict[str, Any]:
    """A run of one step."""
    sink.phase("training")
    sink.sample(make_trajectory(step=0, text="ls"), 1.0)
    sink.step(make_report(step=0, metrics={"reward_mean": 0.5}))
    sink.evaluation("after", EvaluationResult(num=4, pass_rate=0.75))
    return dict(SUMMARY)


def raising(error: BaseException) -> Callable[..., dict[str, Any]]:
    """A run that ends with an error."""

    def fail(*_: Any, **__: Any) -> dict[str, Any]:
        raise error

    return fail


def test_train_leaves_a_run_folder_and_ends_with_one_line_of_json(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_build(monkeypatch, train_run=short_run)
    code, out, _ = run("train", config)
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == SUMMARY
    assert any("step 0  reward 0.500" in line for line in out.splitlines()[:-1])
    folder = tmp_path / "run"
    assert json.loads((folder / "summary.json").read_text()) == SUMMARY
    assert [row["event"] for row in read_lines(folder / "metrics.jsonl")] == ["phase", "step", "evaluation"]
    assert len(read_lines(folder / "transcripts.jsonl")) == 1
    assert (folder / "curves.png").exists()


def test_json_keeps_stdout_for_the_object_alone(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_build(monkeypatch, train_run=short_run)
    code, out, err = run("train", config, "--json")
    assert code == 0
    assert json.loads(out) == SUMMARY
    assert "step 0" in err


def test_seconds_count_from_when_the_callers_clock_began(
    run: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_build(monkeypatch, train_run=short_run)
    monkeypatch.setenv("THUNDERSYNCRL_STARTED_AT", str(time.time() - 1000))
    _, out, _ = run("train", config, "--json")
    assert json.loads(out)["seconds"] >= 1000


def test_a_second_run_needs_resume_or_another_folder(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_build(monkeypatch, train_run=short_run)
    assert run("train", config)[0] == 0
    code, _, err = run("train", config)
    assert (code, "--resume" in err) == (2, True)
    assert run("train", config, f"run={tmp_path / 'other'}")[0] == 0
    code, _, err = run("train", config, "--resume", "learner.eps=1e-7")
    assert (code, "learner.eps: 1e-08 in the run, 1e-07 now" in err) == (2, True)
    assert run("train", config, "--resume", "steps=3")[0] == 0


def test_overrides_and_options_reach_the_run(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def evaluate(config: Config, **options: Any) -> dict[str, Any]:
        return seen.update(size=config.rollout.group_size, **options) or {"pass_rate": 0.5}

    def sample(config: Config, **options: Any) -> dict[str, Any]:
        return seen.update(options) or {"trajectories": 3}

    install_build(monkeypatch, eval_run=evaluate, rollout_run=sample, sft_run=lambda *_: {"pass_rate_warm": 0.5})
    assert run("eval", config, "rollout.group_size=3", "--checkpoint", tmp_path, "--json")[1] == '{"pass_rate": 0.5}\n'
    assert (seen["size"], seen["checkpoint"]) == (3, tmp_path)
    assert run("rollout", config, "--num", 3, "--output", tmp_path / "out.jsonl")[0] == 0
    assert (seen["num"], seen["output"]) == (3, tmp_path / "out.jsonl")
    assert run("sft", config)[1].splitlines()[-1] == '{"pass_rate_warm": 0.5}'


def test_a_command_without_what_it_needs_is_refused(run: Run, config: Path, tmp_path: Path) -> None:
    assert "[warm_start]" in run("sft", config, "warm_start=none")[2]
    assert "[evaluation]" in run("eval", config, "evaluation=none")[2]
    (tmp_path / "out.jsonl").write_text("")
    assert "expected a new file" in run("rollout", config, "--output", tmp_path / "out.jsonl")[2]
    assert "config file or --tiny" in run("certify")[2]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), 2),
        (TaskError("wrong"), 2),
        (NumericsError("wrong"), 1),
        (ExceptionGroup("tasks", [RolloutError("wrong"), ExceptionGroup("more", [RolloutError("wrong")])]), 1),
        (ExceptionGroup("tasks", [TaskError("wrong")]), 2),
    ],
)
def test_an_error_on_purpose_is_one_message_without_a_traceback(
    run: Run, config: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    install_build(monkeypatch, train_run=raising(error))
    got, _, err = run("train", config)
    assert (got, err) == (code, "error: wrong\n")


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("bug"), ExceptionGroup("tasks", [RolloutError("known"), KeyError("bug")])]
)
def test_a_bug_keeps_its_traceback(config: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, run: Run) -> None:
    install_build(monkeypatch, train_run=raising(error))
    monkeypatch.setattr(sys, "argv", ["thundersyncrl", "train", str(config)])
    with pytest.raises(type(error)):
        main()


@pytest.mark.parametrize(
    ("report", "arguments", "code"),
    [
        ({"verdict": "pass", "worst": {}}, ["--tiny"], 0),
        ({"verdict": "fail", "worst": {}}, ["--tiny"], 1),
        ({"verdict": "pass", "worst": {}}, ["--tiny", "rollout.group_size=3"], 0),
        ({"verdict": "pass", "worst": {}}, ["rollout.group_size=3", "--tiny", "--sabotage", "cut"], 0),
    ],
)
def test_certify_exits_by_its_verdict(
    run: Run, monkeypatch: pytest.MonkeyPatch, report: dict[str, Any], arguments: list[str], code: int
) -> None:
    seen: list[Any] = []

    def certify(config: Config | None, *, tiny: bool, sabotage: str, progress: Callable[[str], None]) -> Any:
        progress("one case")
        seen.extend((config and config.rollout.group_size, tiny, sabotage))
        return SimpleNamespace(to_json=lambda: report, table=lambda: "a table")

    module = ModuleType("thundersyncrl.certify")
    module.certify = certify  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "thundersyncrl.certify", module)
    assert run("certify", *arguments, "--json") == (code, json.dumps(report) + "\n", "one case\n")
    assert run("certify", *arguments)[1] == "a table\n"
    assert seen[1:3] == [True, "cut" if "cut" in arguments else ""]
    assert seen[0] == (3 if "rollout.group_size=3" in arguments else None)


@pytest.mark.parametrize("arguments", [["train"], ["no-such-command"], ["train", "x.toml", "--resum"], ["tasks"]])
def test_a_wrong_call_exits_with_2(run: Run, arguments: list[str]) -> None:
    assert run(*arguments)[0] == 2


@pytest.mark.parametrize(
    "command", ["train", "sft", "eval", "rollout", "certify", "check", "tasks make", "tasks check", "tasks list"]
)
def test_help_has_an_example(run: Run, command: str) -> None:
    code, out, _ = run(*command.split(), "--help")
    assert code == 0
    assert f"\n      thundersyncrl {command} " in out


@pytest.mark.parametrize(
    ("content", "override", "named", "meant"),
    [
        ("learning_rte = 1e-5", "", "learning_rte", "learner.learning_rate"),
        ("[rollout]\ntemprature = 0.7", "", "rollout.temprature", "rollout.temperature"),
        ("", "rollout.temprature=0.7", "rollout.temprature", "rollout.temperature"),
        ("[model]\ngroup_size = 4", "", "model.group_size", "rollout.group_size"),
    ],
)
def test_a_misspelt_option_is_refused_before_anything_heavy_is_imported(
    tmp_path: Path, content: str, override: str, named: str, meant: str
) -> None:
    """Case H-28."""
    file = tmp_path / "run.toml"
    file.write_text(content)
    code = (
        "import sys\nfrom thundersyncrl.cli import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'"
    )
    command = [sys.executable, "-c", code, "train", str(file), *([override] if override else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert f"`{named}`" in done.stderr
    assert f"did you mean `{meant}`" in done.stderr
    assert "Traceback" not in done.stderr
    assert "heavy" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"], "nothing was begun"


WAITING = """
import asyncio, sys
from types import ModuleType
from thundersyncrl.cli import main

def train_run(config, *, resume, sink):
    async def wait():
        try:
            print("waiting", flush=True)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            print("cleaned up", flush=True)
    asyncio.run(wait())

build = ModuleType("thundersyncrl.runs")
build.train_run = train_run
sys.modules["thundersyncrl.runs"] = build
main()
"""


@pytest.mark.parametrize(
    ("number", "code", "ignores_interrupts"),
    [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, False), (signal.SIGTERM, 143, True)],
)
def test_a_signal_ends_the_run_by_its_clean_up_and_gives_the_exit_code(
    config: Path, number: signal.Signals, code: int, ignores_interrupts: bool
) -> None:
    """A shell's background job starts with SIGINT ignored; SIGTERM must end it all the same."""
    # set either way: these tests may themselves run as a shell's background job
    interrupt = signal.SIG_IGN if ignores_interrupts else signal.SIG_DFL
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, "train", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (code, "cleaned up\n")
    assert "Traceback" not in err


def test_a_terminal_that_can_not_show_a_character_gets_it_spelled_out(config: Path) -> None:
    code = WAITING.replace("asyncio.run(wait())", "sink.phase('\\u2713 \\udc80')\n    return {}")
    done = subprocess.run(
        [sys.executable, "-c", code, "train", str(config)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert "\\u2713 \\udc80" in done.stdout


def test_tasks_are_made_and_listed(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    code, out, _ = run("tasks", "make", folder, "--num", 4, "--seed", 3, "--kinds", "copy,make", "--split", "heldout")
    assert (code, out) == (0, f"made 4 tasks in {folder}\n")
    code, out, _ = run("tasks", "list", folder)
    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()]
    assert sorted({row[1] for row in rows}) == ["copy", "make"]
    listed = json.loads(run("tasks", "list", folder, "--json")[1])["tasks"]
    assert [task["id"] for task in listed] == [row[0] for row in rows]
    assert run("tasks", "check", folder)[1] == "4 tasks (copy 2, make 2), 0 of them need several turns\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--kinds", "cpoy"], "'copy'"), (["--split", "tran"], "'train'"), (["--difficulties", "esay"], "'easy'")],
)
def test_a_wrong_choice_of_tasks_is_refused_with_the_closest(
    run: Run, tmp_path: Path, arguments: list[str], said: str
) -> None:
    code, _, err = run("tasks", "make", tmp_path / "tasks", *arguments)
    assert (code, said in err) == (2, True)


@pytest.mark.sandbox
def test_a_task_whose_solution_does_not_solve_it_fails_the_check(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    run("tasks", "make", folder, "--num", 2, "--kinds", "copy")
    assert "2 of 2 solutions get reward 1" in run("tasks", "check", folder, "--oracle")[1]
    broken = sorted(folder.iterdir())[0]
    (broken / "solution" / "solve.sh").write_text("#!/bin/bash\ntrue\n")
    code, out, err = run("tasks", "check", folder, "--oracle", "--json")
    assert code == 2
    assert [finding["name"] for finding in json.loads(out)["failed"]] == [broken.name]
    assert "reward 0" in err


@pytest.mark.parametrize("grouped", [False, True])
def test_a_full_disk_is_one_line(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch, grouped: bool) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    install_build(monkeypatch, train_run=raising(ExceptionGroup("tasks", [full]) if grouped else full))
    code, _, err = run("train", config)
    assert code == 1
    assert "error: expected storage that can be written" in err
    assert "Traceback" not in err
