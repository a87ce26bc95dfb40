"""A real run emits every event, and the seconds of each step add up."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.test_driver import DONE, ID, RENDERER, TASK, engine_of, say, see
from tests.runs import Recorder
from tests.test_runs import model_folder, run_whole, tiny_config
from thundersyncrl.environments.scripted import Answer, ScriptedEnvironment
from thundersyncrl.errors import NumericsError, RolloutError, ToolError, VerifierError
from thundersyncrl.learner.learner import Learner
from thundersyncrl.observe import events as events_module
from thundersyncrl.observe.events import Event, EventBuffer
from thundersyncrl.observe.report import trajectory_rows
from thundersyncrl.observe.run_record import RunRecord, read_run
from thundersyncrl.records import Reward
from thundersyncrl.rollout.driver import Episode
from thundersyncrl.rollout.setting import Limits, Setting
from thundersyncrl.runtime.run_folder import RunFolder

pytestmark = pytest.mark.sandbox
__all__ = ["model_folder"]


@pytest.fixture(scope="module", params=["inline", "elastic"])
def ran(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunRecord, Recorder]:
    path = tmp_path_factory.mktemp("emission") / "run"
    _, recorder = run_whole(tiny_config(model_folder, path, placement=request.param, model={"threads": 2}))
    return read_run(RunFolder(path)), recorder


def documented() -> set[tuple[str, str]]:
    rows = re.findall(r"^\| (\w+) \| (`[^|]*) \|", events_module.__doc__ or "", re.MULTILINE)
    return {(actor, what) for actor, cell in rows for what in re.findall(r"`([^`]+)`", cell)}


def test_every_event_is_one_of_the_table_and_all_actors_are_heard(ran: tuple[RunRecord, Recorder]) -> None:
    found = {(e.actor, e.what) for stretch in ran[0].stretches for e in stretch.events}
    assert found <= documented()
    assert found >= {
        ("controller", "start-up"),
        ("controller", "evaluation"),
        ("controller", "warm start"),
        ("controller", "step"),
        ("controller", "settle"),
        ("controller", "publish"),
        ("controller", "trajectory"),
        ("controller", "sample"),
        ("controller", "queue"),
        ("engine", "publish"),
        ("engine", "decode"),
        ("engine", "prefill"),
        ("learner", "optimizer"),
        ("learner", "supervised step"),
        ("sandbox", "environment open"),
        ("sandbox", "environment close"),
        ("sandbox", "tool"),
        ("sandbox", "verifier"),
    }
    assert found & {("learner", "pack"), ("learner", "work")}


def test_busy_and_idle_by_cause_are_each_steps_wall_time(ran: tuple[RunRecord, Recorder]) -> None:
    run, recorder = ran
    steps = [stretch.time for stretch in run.stretches if stretch.window.step >= 0]
    assert [time.window.step for time in steps] == [0, 1]
    for time, report in zip(steps, recorder.reports, strict=True):
        for actor in time.actors.values():
            assert actor.busy_s + actor.total_idle_s == pytest.approx(report.metrics["step_s"], rel=0.01)
        idle = sum(v for k, v in report.metrics.items() if re.fullmatch(r"idle_engine_\w+_s", k))
        assert report.metrics["idle_engine_s"] == pytest.approx(idle, rel=1e-9)
        assert 0.0 <= report.metrics["overlap"] <= 1.0
        assert report.metrics["above_bound"] >= 0.0


def test_the_engine_and_the_learner_are_found_at_work(ran: tuple[RunRecord, Recorder]) -> None:
    for stretch in ran[0].stretches:
        if stretch.window.step >= 0:
            assert stretch.time.actors["engine"].busy_s > 0
            assert stretch.time.gradient_s > 0


def test_every_launched_trajectory_has_a_row_and_a_beginning_and_an_end(ran: tuple[RunRecord, Recorder]) -> None:
    run, recorder = ran
    assert {row["id"] for row in trajectory_rows(run)} == {str(t.id) for t in recorder.trajectories}
    ends = [e.trajectory for s in run.stretches if s.window.step >= 0 for e in s.events if e.what == "trajectory"]
    assert sorted(ends) == sorted(str(t.id) for t in recorder.trajectories)


def test_a_resumed_runs_events_go_on_where_the_checkpoint_was(model_folder: Path, tmp_path: Path) -> None:
    run_whole(tiny_config(model_folder, tmp_path / "run", placement="inline", steps=1))
    run_whole(tiny_config(model_folder, tmp_path / "run", placement="inline"), resume=True)
    run = read_run(RunFolder(tmp_path / "run"))
    assert [s.window.step for s in run.stretches if s.window.step >= 0] == [0, 1]
    assert not [note for note in run.problems if "events" in note]


def heard(world: ScriptedEnvironment) -> list[Event]:
    """What an episode of a scripted engine logs, whatever becomes of it."""
    log = EventBuffer()
    engine = engine_of(say("hello"), say("hello"))
    chosen: dict[str, Any] = {
        "max_turns": 4,
        "max_turn_tokens": 64,
        "max_action_tokens": 256,
        "context_tokens": 4096,
        "trajectory_limit_s": 20.0,
        "grade_limit_s": 20.0,
    }
    setting = Setting(
        engine=engine,
        renderer=RENDERER,
        environment_factory=lambda task: world,
        limits=Limits(**chosen),
        temperature=1.0,
        seed=0,
        events=log,
    )

    async def run() -> None:
        async with Episode(setting, id=ID, task=TASK) as episode:
            trajectory = await episode.play()
            if trajectory.outcome.is_usable:
                with contextlib.suppress(RolloutError):
                    await episode.grade()

    asyncio.run(run())
    return list(log.flush(-1))


def test_an_episode_logs_each_of_its_parts_once_with_its_id_and_verdict() -> None:
    events = heard(ScriptedEnvironment([see("ok"), DONE], verdict=Answer(Reward(value=0.5))))
    assert [e.what for e in events] == [
        "environment open",
        *("sample", "tool") * 2,
        "trajectory",
        "verifier",
        "environment close",
    ]
    assert {(e.step, e.trajectory) for e in events} == {(ID.step, str(ID))}
    details = {e.what: e.detail for e in events if e.detail}
    assert details == {"trajectory": "completed", "verifier": "0.5"}
    assert all(e.start_s <= e.end_s for e in events)


def test_parts_that_fail_are_logged_too() -> None:
    events = heard(ScriptedEnvironment([Answer(ToolError("no shell"))]))
    assert [e.what for e in events] == ["environment open", "sample", "tool", "trajectory", "environment close"]
    assert next(e.detail for e in events if e.what == "trajectory") == "failed (tool)"
    events = heard(ScriptedEnvironment([DONE], verdict=Answer(VerifierError("no verdict"))))
    assert next(e.detail for e in events if e.what == "verifier") == "", "no verdict, no reward"


def test_a_run_that_fails_leaves_the_events_that_led_there(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Learner) -> None:
        raise NumericsError("the learner broke")

    monkeypatch.setattr(Learner, "finish_step", broken)
    config = tiny_config(model_folder, tmp_path / "run", placement="inline", warm_start="none", evaluation="none")
    with pytest.raises(NumericsError, match="the learner broke"):
        run_whole(config)
    run = read_run(RunFolder(tmp_path / "run"))
    assert run.stretches[-1].window.name == "step 0, unfinished"
    assert len(trajectory_rows(run)) == 4
