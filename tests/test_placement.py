"""Engine and learner in processes of their own: the same run as inline, and nothing left when something dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.runs import Recorder
from tests.test_runs import last_weights, model_folder, run_whole, tiny_config
from thundersyncrl.build import build, placement_of
from thundersyncrl.certify.run import certify
from thundersyncrl.errors import ConfigError, WorkerError
from thundersyncrl.observe.event_file import read_events
from thundersyncrl.observe.report import report_json
from thundersyncrl.observe.run_record import read_run
from thundersyncrl.runs import train_run
from thundersyncrl.runtime.processes import ProcessRuntime
from thundersyncrl.runtime.run_folder import RunFolder, open_run

pytestmark = pytest.mark.sandbox
__all__ = ["model_folder"]


def children(pid: int) -> list[int]:
    done = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(line) for line in done.stdout.split()]


def workers() -> list[int]:
    found: list[int] = []
    for pid in children(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"thundersyncrl.worker" in command:
            found.append(pid)
    return found


@pytest.mark.parametrize("train", ["lora", "full"])
def test_every_placement_gives_the_same_run(model_folder: Path, tmp_path: Path, train: str) -> None:
    runs: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, torch.Tensor]]] = {}
    for placement in ("inline", "elastic", "split"):
        config = tiny_config(
            model_folder,
            tmp_path / placement,
            placement=placement,
            steps=3,
            model={"train": train, "dtype": "float64", "threads": 2},
            learner={"learning_rate": 1e-2},
            tasks={"kinds": ["make"]},
        )
        _, recorder = run_whole(config)
        assert [r.num_failed for r in recorder.reports] == [0, 0, 0]
        runs[placement] = {str(t.id): t.token_ids for t in recorder.trajectories}, last_weights(tmp_path / placement)
    assert workers() == []
    for placement in ("elastic", "split"):
        assert runs[placement][0] == runs["inline"][0]
        for name, weight in runs["inline"][1].items():
            torch.testing.assert_close(runs[placement][1][name], weight, rtol=0, atol=1e-8)


def test_both_processes_tell_what_they_did_when(model_folder: Path, tmp_path: Path) -> None:
    run_whole(tiny_config(model_folder, tmp_path / "run", placement="split"))
    events = read_events(tmp_path / "run" / "events.jsonl").events
    seen = {(event.actor, event.what) for event in events}
    assert ("engine", "publish") in seen
    assert ("learner", "supervised step") in seen
    assert ("sandbox", "tool") in seen
    assert any(actor == "engine" and "decode" in what for actor, what in seen)
    assert {event.step for event in events if event.what == "optimizer"} == {0, 1}


def test_a_resumed_run_in_processes_ends_where_the_whole_one_does(model_folder: Path, tmp_path: Path) -> None:
    run_whole(tiny_config(model_folder, tmp_path / "whole", placement="inline"))
    run_whole(tiny_config(model_folder, tmp_path / "parts", placement="elastic", steps=1))
    run_whole(tiny_config(model_folder, tmp_path / "parts", placement="elastic"), resume=True)
    left, right = last_weights(tmp_path / "whole"), last_weights(tmp_path / "parts")
    for name, weight in left.items():
        torch.testing.assert_close(right[name], weight, rtol=0, atol=1e-6)


class Killer(Recorder):
    """Kills a worker when the first trajectory has ended."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self._which = which
        self.killed = 0

    def phase(self, name: str, detail: str) -> None:
        if name == "training" and not self.killed:
            self.killed = sorted(workers())[self._which]
            os.kill(self.killed, signal.SIGKILL)


@pytest.mark.parametrize(("which", "role"), [(0, "learner"), (1, "engine")])
def test_a_worker_that_is_killed_ends_the_run_with_its_reason(
    model_folder: Path, tmp_path: Path, which: int, role: str
) -> None:
    config = tiny_config(model_folder, tmp_path / "run", placement="elastic")
    open_run(config, resume=False)
    with pytest.raises(WorkerError, match=rf"the {role} process .* killed by SIGKILL"):
        train_run(config, resume=False, sink=Killer(which))
    assert workers() == []


def test_workers_die_with_a_controller_that_is_killed(model_folder: Path, tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.test_runs import tiny_config\n"
        "from thundersyncrl.runtime.processes import ProcessRuntime\n"
        "async def main():\n"
        "    config = tiny_config(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "    runtime = await ProcessRuntime.start(config, num_threads=2, elastic=True)\n"
        "    print(runtime.engine.pid, runtime.learner.pid, flush=True)\n"
        "    await runtime.serve()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, str(model_folder), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as controller:
        assert controller.stdout is not None
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        assert len(pids) == 2
        controller.kill()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its controller"
        time.sleep(0.05)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_what_a_worker_refuses_is_the_runs_error(model_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(model_folder, tmp_path / "run", placement="elastic", rollout={"context_tokens": 10**6})
    open_run(config, resume=False)
    with pytest.raises(ConfigError, match="context_tokens"):
        train_run(config, resume=False, sink=Recorder())
    assert workers() == []


def test_an_error_inside_the_learner_ends_the_run_with_its_own_type(model_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(model_folder, tmp_path / "run")

    async def run() -> None:
        runtime = await ProcessRuntime.start(config, num_threads=2, elastic=True)
        try:
            runtime.learner.channel.tell("reward", None, float("nan"))
            await asyncio.wait_for(runtime.serve(), 60)
        finally:
            await runtime.close()

    with pytest.raises(ArithmeticError, match="finite reward"):
        asyncio.run(run())


def test_the_engine_confirms_the_learners_weights(model_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(model_folder, tmp_path / "run", placement="split", evaluation=None, warm_start=None)

    async def run() -> None:
        parts = await build(config, Recorder(), placement="split")
        try:
            await parts.trainer.begin_version(0)
            receipt = await parts.engine.publish(0)
            assert receipt.digest == parts.trainer.digest
        finally:
            await parts.runtime.close()

    asyncio.run(run())


def test_split_keeps_tools_off_the_learners_cores_and_gives_them_back_at_the_end(
    model_folder: Path, tmp_path: Path
) -> None:
    config = tiny_config(model_folder, tmp_path / "run", placement="split", evaluation=None, warm_start=None)
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")

    async def run() -> None:
        parts = await build(config, Recorder(), placement="split")
        runtime = parts.runtime
        assert isinstance(runtime, ProcessRuntime)
        try:
            own, engine = os.sched_getaffinity(0), os.sched_getaffinity(runtime.engine.pid)
            learner = os.sched_getaffinity(runtime.learner.pid)
        finally:
            await runtime.close()
        assert own == engine
        assert own | learner == before
        assert not own & learner

    asyncio.run(run())
    assert os.sched_getaffinity(0) == before


def test_one_thread_runs_inline_by_default(model_folder: Path, tmp_path: Path) -> None:
    one = tiny_config(model_folder, tmp_path / "run", model={"threads": 1})
    two = tiny_config(model_folder, tmp_path / "run", model={"threads": 2})
    assert placement_of(one) == "inline"
    assert placement_of(two) == ("inline" if torch.cuda.is_available() else "elastic")


def test_an_asynchronous_run_trains_older_versions_says_so_and_resumes(model_folder: Path, tmp_path: Path) -> None:
    rollout = {"max_staleness": 2}
    parts = tiny_config(model_folder, tmp_path / "run", placement="split", steps=2, rollout=rollout)
    _, first = run_whole(parts)
    whole = tiny_config(model_folder, tmp_path / "run", placement="split", steps=5, rollout=rollout)
    _, rest = run_whole(whole, resume=True)
    assert workers() == []
    assert [r.step for r in first.reports + rest.reports] == [0, 1, 2, 3, 4]
    assert all(r.num_trained == 4 for r in first.reports + rest.reports)
    assert max(r.metrics["staleness_max"] for r in rest.reports) > 0
    order = [t.task.id for t in sorted(first.trajectories + rest.trajectories, key=lambda t: t.id)]
    one_way = tiny_config(model_folder, tmp_path / "whole", placement="split", steps=5)
    assert order == [t.task.id for t in sorted(run_whole(one_way)[1].trajectories, key=lambda t: t.id)]
    run = read_run(RunFolder(tmp_path / "run"))
    assert "Asynchronous run" in report_json(RunFolder(tmp_path / "run"), run)["notes"][0]
    steps = [s for s in run.stretches if s.window.step >= 0]
    assert [s.window.runs_ahead for s in steps] == [True] * 5
    for stretch in steps:
        for of in stretch.time.actors.values():
            assert of.busy_s + of.total_idle_s == pytest.approx(stretch.window.seconds, rel=1e-6)


def test_rollouts_that_run_ahead_are_refused_where_they_cant(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_staleness = 2` has no use with `placement = \"inline\""):
        tiny_config(model_folder, tmp_path, placement="inline", rollout={"max_staleness": 2})
    alone = tiny_config(model_folder, tmp_path, model={"threads": 1}, rollout={"max_staleness": 2})
    with pytest.raises(ConfigError, match="several cores"):
        placement_of(alone)
    with pytest.raises(ConfigError, match="nothing to certify"):
        certify(alone, tiny=True, progress=lambda line: None)
