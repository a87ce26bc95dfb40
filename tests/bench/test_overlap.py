"""`bench overlap`: what is drawn, how arms take turns, how figures come from steps, and one small real run."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from pathlib import Path

import pytest

from thundersyncrl.bench.overlap import LEVELS, main, workload_of
from thundersyncrl.bench.overlap_arms import Measured, Plan, turns
from thundersyncrl.bench.overlap_figures import figures, summary, table
from thundersyncrl.bench.random_model import ModelSize, byte_tokenizer, save_random_model
from thundersyncrl.bench.tool_world import LogNormal, ToolWorld, Workload, draw_script, tool_worlds
from thundersyncrl.config import Config, ModelConfig
from thundersyncrl.environments.isolation import detect
from thundersyncrl.learner.policy import load_policy
from thundersyncrl.records import Task
from thundersyncrl.rollout.renderer import Renderer

TINY = [
    *("--groups", "2", "--group-size", "2", "--max-turns", "2", "--turn-tokens", "4", "--tool", "0.01"),
    *("--layers", "1", "--width", "32", "--steps", "1"),
]


def wide(**changes: LogNormal) -> Workload:
    """A workload whose draws are never cut."""
    return Workload(tool_s=LogNormal(median=0.4, sigma=1.0, least=0.0, most=1e9), **changes)


def test_draws_depend_on_seed_task_and_member_alone() -> None:
    work = Workload()
    first = draw_script(work, rho=0.5, task_id="a", member=1)
    assert draw_script(work, rho=0.5, task_id="a", member=1) == first
    assert draw_script(work, rho=0.5, task_id="a", member=2) != first
    assert draw_script(work, rho=0.5, task_id="b", member=1) != first
    assert draw_script(Workload(seed=1), rho=0.5, task_id="a", member=1) != first


def test_draws_are_heavy_tailed_and_cut() -> None:
    scripts = [draw_script(Workload(), rho=0.0, task_id=str(t), member=m) for t in range(200) for m in range(2)]
    seconds = [s for script in scripts for s in script.tools_s]
    assert 0.35 < statistics.median(seconds) < 0.45
    assert max(seconds) == 8.0
    assert statistics.mean(seconds) > 1.4 * statistics.median(seconds)
    numbers = [script.num_turns for script in scripts]
    assert (min(numbers), max(numbers)) == (1, 12)
    assert statistics.median(numbers) == 4
    for script in scripts:
        assert len(script.observations) == script.num_turns
        assert script.observations[-1] == ""
        assert all(8 <= len(o) <= 384 for o in script.observations[:-1])


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_members_of_a_group_correlate_as_asked(rho: float) -> None:
    pairs = [
        [math.log(draw_script(wide(), rho=rho, task_id=str(t), member=m).tools_s[0]) for m in range(2)]
        for t in range(1500)
    ]
    left, right = zip(*pairs, strict=True)
    assert statistics.correlation(left, right) == pytest.approx(rho, abs=0.06)
    assert statistics.stdev(left) == pytest.approx(1.0, abs=0.06)


def test_no_group_has_equal_rewards() -> None:
    for task in range(50):
        rewards = {draw_script(Workload(), rho=0.9, task_id=str(task), member=m).reward for m in range(2)}
        assert rewards == {0.0, 1.0}


def test_worlds_of_a_task_play_its_members_scripts_in_order() -> None:
    work = Workload(group_size=2, tool_s=LogNormal(median=0.001, sigma=0.1, least=0.0, most=0.002))
    make = tool_worlds(work, rho=0.0, isolation=None)

    async def play(task: str) -> tuple[list[str], float]:
        world = make(Task(id=task, instruction=""))
        texts: list[str] = []
        await world.open()
        while not (seen := await world.act("anything")).done:
            texts.append(seen.text)
        reward = await world.grade()
        await world.close()
        return texts, reward.value

    for task, member in (("a", 0), ("b", 0), ("a", 1), ("a", 0)):
        script = draw_script(work, rho=0.0, task_id=task, member=member)
        assert asyncio.run(play(task)) == (list(script.observations[:-1]), script.reward)


@pytest.mark.sandbox
def test_a_tool_in_the_sandbox_prints_the_script() -> None:
    work = Workload(tool_s=LogNormal(median=0.001, sigma=0.1, least=0.0, most=0.002))
    script = next(s for t in range(9) if (s := draw_script(work, rho=0.0, task_id=str(t), member=0)).num_turns > 1)
    world = tool_worlds(work, rho=0.0, isolation=detect())(Task(id="a", instruction=""))
    assert isinstance(world, ToolWorld)
    world._script = script

    async def act() -> str:
        await world.open()
        try:
            return (await world.act("anything")).text
        finally:
            await world.close()

    assert asyncio.run(act()) == script.observations[0]


def test_the_model_is_small_and_can_be_trained(tmp_path: Path) -> None:
    num_parameters = save_random_model(tmp_path, ModelSize(), context_tokens=512)
    assert 3_000_000 < num_parameters < 10_000_000
    policy, tokenizer = load_policy(ModelConfig(path=str(tmp_path), train="full"))
    assert sum(p.numel() for p in policy.trained.values()) == num_parameters
    assert policy.vocab_size == len(tokenizer) == len(byte_tokenizer())
    prompt = Renderer(tokenizer).prompt("abc", "x" * 100)
    assert 100 < len(prompt) < 160


def test_the_longest_trajectory_fits_its_context() -> None:
    work, render = Workload(), Renderer(byte_tokenizer())
    prompt = render.prompt(ToolWorld.system_prompt, work.tasks("a", 1)[0].instruction)
    suffix = render.suffix("x" * round(work.observation_tokens.most), last_id=0)
    assert len(prompt) + work.max_turns * (work.turn_tokens + len(suffix)) <= work.context_tokens


def test_arms_take_each_step_one_after_the_other_and_who_is_first_changes(tmp_path: Path) -> None:
    plan = Plan(
        workload=Workload(),
        model=tmp_path,
        run=tmp_path,
        rhos=(0.0, 0.9),
        num_steps=2,
        repetitions=2,
        num_threads=2,
        cores=frozenset({0, 1}),
        isolation=None,
    )
    taken = list(turns(plan, ["batch", "group", "trajectory"]))
    assert len(taken) == 3 * 2 * 2 * 2
    for start in range(0, len(taken), 3):
        assert len({(rho, step) for _, rho, step in taken[start : start + 3]}) == 1
        assert {arm for arm, _, _ in taken[start : start + 3]} == {"batch", "group", "trajectory"}
    assert {taken[start][0] for start in range(0, len(taken), 3)} == {"batch", "group", "trajectory"}
    config = plan.config("group", "split")
    assert (config.learner.stream, config.placement) == ("group", "split")


def step(arm: str, seconds: float, *, number: int = 0, rho: float = 0.0, tail_s: float = 0.0) -> Measured:
    metrics = {"step_s": seconds, "learner_busy_s": 4.0, "learner_tail_work_s": tail_s, "cpu_engine_s": 1.0}
    return Measured(arm=arm, placement="split", rho=rho, step=number, level="", metrics=metrics)


def test_figures_are_medians_and_ratios_over_the_batch_arm() -> None:
    steps = [
        *(step("batch", seconds, number=n, tail_s=4.0) for n, seconds in enumerate((8.0, 10.0, 30.0))),
        *(step("trajectory", seconds, number=n, tail_s=0.2) for n, seconds in enumerate((4.0, 6.0, 5.0))),
        step("batch", 9.0, rho=0.9),
    ]
    found = figures(steps)
    arms = found["split"]["0"]
    assert (arms["trajectory"]["step_s"], arms["trajectory"]["step_min_s"]) == (5.0, 4.0)
    assert arms["trajectory"]["ratio"] == 2.0
    assert arms["trajectory"]["paired_ratio"] == 2.0
    assert arms["trajectory"]["tail_share"] == pytest.approx(0.05)
    assert set(found["split"]["0.9"]) == {"batch"}
    assert summary(found) == {"arms": {"batch": 10.0, "trajectory": 5.0}, "ratios": {"trajectory": 2.0}}
    assert "trajectory" in table(found)


def test_without_the_batch_arm_there_are_no_ratios() -> None:
    found = figures([step("group", 8.0)])
    assert summary(found) == {"arms": {"group": 8.0}, "ratios": {}}
    assert "group" in table(found)


def test_help_has_an_example_and_every_level_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "thundersyncrl bench overlap --steps" in shown
    assert all(level in shown for level in LEVELS)
    assert {"batch", "group", "trajectory"} <= set(LEVELS)


@pytest.mark.parametrize("arguments", [["--rho", "1.5"], ["--arms", "nothing"], ["--steps", "0"]])
def test_what_makes_no_sense_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_arms_run_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    arms = ["batch", "trajectory", "async1"]
    arguments = ["--arms", *arms, "--placements", "split", "--rho", "0", "--no-sandbox", "--json"]
    assert main([*arguments, *TINY]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert set(result["arms"]) == set(arms)
    wanted = {arm: pytest.approx(result["arms"]["batch"] / result["arms"][arm]) for arm in arms[1:]}
    assert result["ratios"] == wanted
    taken = result["details"]["steps"]
    assert [s["arm"] for s in taken] == arms
    assert taken[2]["metrics"]["staleness_max"] == 1, "in a full pipeline, some rollouts began a step early"
    assert all("staleness_max" not in of["metrics"] for of in taken[:2])
    for of in taken:
        assert of["metrics"]["num_trained"] == 4
        assert of["metrics"]["learner_busy_s"] > 0
        assert all(of["metrics"][f"cpu_{who}_s"] >= 0 for who in ("engine", "learner", "controller", "others"))
        assert 0 < of["metrics"]["bound_s"] <= of["metrics"]["step_s"]
    assert taken[0]["metrics"]["num_final_trajectories"] == 4, "the batch arm works when every coefficient is known"
    assert result["details"]["conditions"]["sandbox"] is False
    assert "split rho=0 step 0 batch" in shown.err


def test_options_reach_the_workload() -> None:
    from thundersyncrl.bench.overlap import _parser

    work = workload_of(_parser().parse_args(["--tool", "0.1", "--max-turns", "3", "--seed", "5"]))
    assert (work.tool_s.median, work.tool_s.most, work.max_turns, work.seed) == (0.1, 2.0, 3, 5)
    assert Config().rollout.group_size == work.group_size
