"""Oracle transcripts are rendered and masked as sampled trajectories are, and only right ones are taken."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.toys import toy_tokenizer
from thundersyncrl.environments.environment import Observation
from thundersyncrl.environments.scripted import Answer, ScriptedEnvironment
from thundersyncrl.errors import EnvironmentFailure, TaskError, TimeLimitError
from thundersyncrl.records import Reward, Status, Task, Trajectory, TrajectoryId
from thundersyncrl.rollout.driver import Episode
from thundersyncrl.rollout.renderer import Renderer
from thundersyncrl.rollout.scripted import Reply, ScriptedEngine
from thundersyncrl.rollout.setting import Limits, Setting
from thundersyncrl.rollout.transcripts import oracle_transcript

TOKENIZER = toy_tokenizer()
RENDERER = Renderer(TOKENIZER)
ID = TrajectoryId(0, 1, 2)
LOOK, FINISH = "```bash\nls\n```", "```bash\ncat hello\n```\nDONE"
DONE = Answer(Observation(text="", done=True))


def see(text: str, **settings: Any) -> Answer[Observation]:
    return Answer(Observation(text=text, done=False, **settings))


def task_at(folder: Path, turns: object) -> Task:
    """Return a task whose oracle is `turns`, written as JSON unless it's bytes."""
    (folder / "solution").mkdir()
    data = turns if isinstance(turns, bytes) else json.dumps(turns).encode()
    (folder / "solution" / "turns.json").write_bytes(data)
    return Task(id="find-it", instruction="find it", folder=folder)


def transcript(task: Task, world: ScriptedEnvironment, **settings: Any) -> Trajectory:
    """Return the oracle's transcript; the world is closed however it ends."""
    try:
        return asyncio.run(oracle_transcript(task, RENDERER, lambda task: world, id=ID, version=4, **settings))
    finally:
        assert world.num_closed == 1


def test_a_transcript_holds_the_oracles_tokens_and_what_the_world_answered(tmp_path: Path) -> None:
    world = ScriptedEnvironment([see("hello <|im_end|>"), DONE], system_prompt="Use bash.")
    result = transcript(task_at(tmp_path, [LOOK, FINISH]), world)
    assert world.actions == [LOOK, FINISH]
    end = RENDERER.end_of_turn_id
    first, second = (tuple(TOKENIZER.encode(text)) for text in (LOOK, FINISH))
    assert [turn.action_ids for turn in result.turns] == [(*first, end), (*second, end)]
    assert result.prompt_ids == RENDERER.prompt("Use bash.", "find it")
    assert result.turns[1].observation_ids == RENDERER.suffix("hello <|im_end|>", last_id=end)
    assert result.behavior_logprobs == (0.0,) * (len(first) + len(second) + 2)
    assert (result.id, result.version, result.outcome.status) == (ID, 4, Status.COMPLETED)
    assert [m["role"] for m in result.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_a_transcript_has_the_tokens_and_mask_of_an_episode_that_samples_the_same(tmp_path: Path) -> None:
    task = task_at(tmp_path, [LOOK, FINISH])
    oracle = transcript(task, ScriptedEnvironment([see("notes"), DONE]))
    replies = [Reply(token_ids=(*TOKENIZER.encode(text), RENDERER.end_of_turn_id)) for text in (LOOK, FINISH)]
    setting = Setting(
        engine=ScriptedEngine(lambda request, turn: replies[turn]),
        renderer=RENDERER,
        environment_factory=lambda task: ScriptedEnvironment([see("notes"), DONE]),
        limits=Limits(
            max_turns=4,
            max_turn_tokens=96,
            max_action_tokens=256,
            context_tokens=1024,
            trajectory_limit_s=20.0,
            grade_limit_s=20.0,
        ),
        temperature=1.0,
        seed=0,
    )
    sampled = asyncio.run(Episode(setting, id=ID, task=task).play())
    assert oracle.token_ids == sampled.token_ids
    assert oracle.action_mask == sampled.action_mask
    assert oracle.messages == sampled.messages


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_an_oracle_that_does_not_solve_its_task_is_refused_by_name(tmp_path: Path, value: float) -> None:
    world = ScriptedEnvironment([DONE], verdict=Answer(Reward(value=value)))
    with pytest.raises(TaskError, match=rf"reward 1, got {value} \(task find-it\)"):
        transcript(task_at(tmp_path, [FINISH]), world)


@pytest.mark.parametrize(
    ("acts", "says"),
    [
        ([see("no block", is_malformed=True), DONE], r"environment reads, got 'no block' \(task find-it, turn 1 of 2"),
        ([DONE, DONE], r"got done=True \(task find-it, turn 1 of 2"),
        ([see("ok"), see("ok")], r"got done=False \(task find-it, turn 2 of 2"),
    ],
)
def test_an_oracle_that_is_misread_or_ends_early_or_late_is_refused(
    tmp_path: Path, acts: list[Answer[Observation]], says: str
) -> None:
    with pytest.raises(TaskError, match=says):
        transcript(task_at(tmp_path, [LOOK, FINISH]), ScriptedEnvironment(acts))


@pytest.mark.parametrize("turns", [b"{not json", b"\xff", [], {}, "ls", [1], ["ls", ""], None])
def test_an_unreadable_oracle_is_refused_before_a_world_is_built(tmp_path: Path, turns: object) -> None:
    task = task_at(tmp_path, turns)
    with pytest.raises(TaskError, match=r"turns\.json"):
        asyncio.run(oracle_transcript(task, RENDERER, _no_world, id=ID, version=0))


def test_a_task_without_oracle_is_refused(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        task = Task(id="bare", instruction="", folder=folder)
        with pytest.raises(TaskError, match=r"turns\.json"):
            asyncio.run(oracle_transcript(task, RENDERER, _no_world, id=ID, version=0))


def test_a_world_that_fails_or_hangs_is_named_and_closed(tmp_path: Path) -> None:
    task = task_at(tmp_path, [FINISH])
    with pytest.raises(EnvironmentFailure, match="no bubblewrap"):
        transcript(task, ScriptedEnvironment(opening=Answer(EnvironmentFailure("no bubblewrap"))))
    hangs = ScriptedEnvironment([Answer(Observation(text="", done=True), float("inf"))])
    with pytest.raises(TimeLimitError, match="the oracle of task find-it"):
        transcript(task, hangs, limit_s=0.1)


def _no_world(task: Task) -> ScriptedEnvironment:
    raise AssertionError(f"an environment was made for {task.id}")
