"""`bench trl`: figures, what TRL's side is given, refusals, and one small real round where TRL is installed."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thundersyncrl import cli
from thundersyncrl.bench.random_model import byte_tokenizer
from thundersyncrl.bench.trl import _parser, figures, main, require_trl, table, workload_of
from thundersyncrl.bench.trl_peer import TOOL, TrlEnvironment, force_tool_calls, messages, trl_settings
from thundersyncrl.bench.trl_workload import Setup, Step, measured, script_of, worlds
from thundersyncrl.errors import ConfigError, ContractError
from thundersyncrl.rollout.renderer import Renderer

SMALL = [
    *("--groups", "2", "--group-size", "2", "--turns", "3", "--turn-tokens", "4", "--tool", "0.01"),
    *("--layers", "1", "--width", "32", "--steps", "1", "--threads", "1"),
]


def setup_of(name: str, folder: Path = Path("nowhere")) -> Setup:
    work = workload_of(_parser().parse_args(SMALL), name)
    return Setup(name=name, work=work, folder=folder, num_steps=1, num_threads=1, micro_batch=2)


def step(arm: str, workload: str, seconds: float, **changes: Any) -> Step:
    values: dict[str, Any] = {
        **{"arm": arm, "workload": workload, "number": 1, "seconds": seconds, "num_trajectories": 8},
        **{"num_tokens": 160, "turns": 1.0, "tool_s": 0.0, "tools_at_once_s": 0.0},
    }
    return Step(**(values | changes))


def test_figures_are_medians_and_ratios() -> None:
    found = figures(
        [
            *(step("trl", "single", s) for s in (4.0, 2.0, 400.0)),
            *(step("ours", "single", s) for s in (1.0, 2.0, 0.001)),
            step("trl", "multi", 10.0, turns=3.0, tool_s=8.0, tools_at_once_s=2.0),
            step("ours", "multi", 2.0, turns=3.0, tool_s=8.0, tools_at_once_s=2.0, num_tokens=80),
        ]
    )
    assert found["arms"] == {"trl@single": 2.0, "ours@single": 8.0, "trl@multi": 0.8, "ours@multi": 4.0}
    assert found["ratios"] == {"single": 4.0, "multi": 5.0}
    details = found["details"]
    assert details["tokens_per_s"]["ours@multi"] == 40.0
    assert details["token_ratios"] == {"single": 4.0, "multi": 2.5}
    assert details["trl_at_once"] == {"trl@multi": 2.0}, "of ten seconds, six were other trajectories' tools"
    assert details["ratios_at_once"] == {"multi": 2.0}
    assert [s["seconds"] for s in details["steps"]][:3] == [4.0, 2.0, 400.0]
    json.dumps(found, allow_nan=False)


def test_the_table_has_a_line_a_workload() -> None:
    found = figures([step("trl", "single", 4.0), step("ours", "single", 2.0)])
    lines = table(found).splitlines()
    assert lines[1].split() == ["single", "2.00", "4.00", "2.00", "40.00", "80.00", "2.00", "-"]


def test_both_workloads_have_as_many_tokens_a_trajectory() -> None:
    single, multi = setup_of("single"), setup_of("multi")
    assert (single.num_turns, single.work.turn_tokens) == (1, 12)
    assert (multi.num_turns, multi.work.turn_tokens) == (3, 4)
    assert single.config().rollout.max_action_tokens == multi.config().rollout.max_action_tokens == 12


def test_only_calls_between_turns_take_time() -> None:
    setup = setup_of("multi")
    calls = setup.tool_seconds(0)
    assert [len(of) for of in calls] == [2] * 4
    assert all(0.0 < seconds < 1.0 for of in calls for seconds in of)
    assert calls != setup.tool_seconds(1)
    assert setup_of("single").tool_seconds(0) == [()] * 4
    script = script_of(setup.work, setup.tasks(0)[0].id, 0)
    assert script.tools_s[-1] == script.verifier_s == 0.0


def test_without_tool_time_nothing_sleeps() -> None:
    work = workload_of(_parser().parse_args([*SMALL, "--tool", "0"]), "multi")
    assert script_of(work, "a", 0).tools_s == (0.0, 0.0, 0.0)


async def _texts(setup: Setup) -> list[list[str]]:
    make, task = worlds(setup.work), setup.tasks(0)[0]
    members = [make(task) for _ in range(setup.work.group_size)]
    return [[(await world.act("")).text for _ in range(setup.num_turns)] for world in members]


def test_both_arms_give_members_the_same_scripts() -> None:
    setup = setup_of("multi")
    task = setup.tasks(0)[0]
    theirs: list[list[str]] = []
    for position in (2, 3):  # of the second group; as the first members of any
        environment = TrlEnvironment(setup.work, position)
        environment.reset(task_id=task.id, prompt=messages(task))
        theirs.append([environment.look() for _ in range(setup.num_turns - 1)])
    assert [texts[:-1] for texts in asyncio.run(_texts(setup))] == theirs
    assert theirs[0] != theirs[1]


def test_a_call_before_reset_is_refused() -> None:
    with pytest.raises(ContractError, match="expected `reset`"):
        TrlEnvironment(setup_of("multi").work, 0).look()


def test_the_forced_parser_reads_a_call_in_every_text() -> None:
    tokenizer: Any = byte_tokenizer()
    force_tool_calls(tokenizer)
    (call,) = tokenizer.parse_response([1, 2], prefix=[3], tools=[])["tool_calls"]
    assert call == {"type": "function", "function": {"name": TOOL, "arguments": {}}}
    assert tokenizer.response_template is not None
    assert callable(getattr(TrlEnvironment, TOOL))


def test_prompts_and_tool_texts_are_the_same_tokens_in_both_arms() -> None:
    tokenizer: Any = byte_tokenizer()
    renderer, task = Renderer(byte_tokenizer()), setup_of("multi").tasks(0)[0]  # type: ignore[arg-type]
    force_tool_calls(tokenizer)
    chat: list[dict[str, Any]] = [*messages(task)]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tuple(prompt) == renderer.prompt(*(message["content"] for message in chat))
    chat.append({"role": "assistant", "content": ""})
    before = tokenizer.apply_chat_template(chat, return_dict=False)
    chat.append({"role": "tool", "name": TOOL, "content": "what it prints"})
    after = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    end = before.index(tokenizer.eos_token_id, len(prompt)) + 1
    assert tuple(after[end:]) == renderer.suffix("what it prints", last_id=tokenizer.eos_token_id)


def test_trl_is_given_the_sizes_of_our_arm() -> None:
    setup = setup_of("multi")
    settings, config = trl_settings(setup), setup.config()
    assert settings["num_generations"] == config.rollout.group_size
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 4
    assert settings["steps_per_generation"] == settings["gradient_accumulation_steps"], "one optimizer step a batch"
    assert settings["generation_kwargs"] == {"max_new_tokens": config.rollout.max_turn_tokens}
    assert settings["max_tool_calling_iterations"] == 2
    assert (settings["beta"], settings["use_vllm"], settings["bf16"]) == (0.0, False, False)
    assert config.model.train == "full"


def test_other_work_than_was_given_is_refused() -> None:
    setup = setup_of("multi")
    assert measured(setup, "trl", 0, seconds=1.0, num_trained=4, num_tokens=9, turns=3.0).num_trajectories == 4
    for num_trained, turns in ((3, 3.0), (4, 2.5)):
        with pytest.raises(ContractError, match="expected 4 trained trajectories of 3 turns in step 0 of trl"):
            measured(setup, "trl", 0, seconds=1.0, num_trained=num_trained, num_tokens=9, turns=turns)


def _no_version(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_without_trl_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", _no_version)
    monkeypatch.setattr(sys, "argv", ["thundersyncrl", "bench", "trl", *SMALL])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "expected the package `trl` to compare with, got none; install thundersyncrl[trl]" in capfd.readouterr().err


@pytest.mark.parametrize(("version", "is_fine"), [("1.16.0", True), ("1.20.0.dev0", True), ("1.15.9", False)])
def test_versions_of_trl(version: str, is_fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if is_fine:
        assert require_trl() == version
    else:
        with pytest.raises(ConfigError, match=f"at least 1.16 and below 2, got {version}"):
            require_trl()


def test_a_micro_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="divides the 4 trajectories of a step, got 3"):
        main([*SMALL, "--micro-batch", "3"])


@pytest.mark.parametrize("option", ["--turns", "--group-size"])
def test_one_is_too_few(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([option, "1"])
    assert "expected at least 2, got 1" in capfd.readouterr().err


def test_the_help_loads_neither_torch_nor_trl() -> None:
    code = (
        "import sys\n"
        "from thundersyncrl.bench.trl import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'trl', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "thundersyncrl bench trl --groups 2" in out
    assert out.splitlines()[-1] == "[]"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL isn't installed: thundersyncrl[trl]")
def test_one_small_real_round(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json"]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert set(found["arms"]) == {"trl@single", "ours@single", "trl@multi", "ours@multi"}
    assert set(found["ratios"]) == {"single", "multi"}
    assert all(speed > 0 for speed in found["arms"].values())
    steps = found["details"]["steps"]
    assert [(s["arm"], s["number"]) for s in steps] == [("trl", 1), ("ours", 1)] * 2
    assert all(4 <= s["num_tokens"] <= 4 * 12 for s in steps)
    assert [s["turns"] for s in steps] == [1.0, 1.0, 3.0, 3.0]
    assert set(found["details"]["ratios_at_once"]) == {"multi"}
    assert "at once" in err
