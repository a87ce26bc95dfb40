"""Laws of one episode: what is recorded is what was sampled, and every end has a name."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.test_renderer import DROPS_THINKING, hostile_text
from tests.toys import tiny_model, toy_tokenizer
from thundersyncrl.environments.environment import Environment, Observation
from thundersyncrl.environments.scripted import Answer, ScriptedEnvironment
from thundersyncrl.errors import (
    EngineError,
    EnvironmentFailure,
    PhaseError,
    TimeLimitError,
    ToolError,
    VerifierError,
)
from thundersyncrl.records import FinishReason, Reward, Status, Task, Trajectory, TrajectoryId
from thundersyncrl.rollout import boundary, driver
from thundersyncrl.rollout.driver import Episode
from thundersyncrl.rollout.engine import Engine, SampleRequest, request_seed
from thundersyncrl.rollout.renderer import Renderer
from thundersyncrl.rollout.scripted import Reply, ScriptedEngine
from thundersyncrl.rollout.setting import Limits, Setting

TOKENIZER = toy_tokenizer()
RENDERER = Renderer(TOKENIZER)
END = RENDERER.end_of_turn_id
HE, LLO, HELLO = TOKENIZER.convert_tokens_to_ids(["he", "llo", "hello"])
ID = TrajectoryId(1, 2, 3)
TASK = Task(id="greet", instruction="say hello")
DONE = Answer(Observation(text="", done=True))
FOREVER = math.inf


def see(text: str, **settings: Any) -> Answer[Observation]:
    return Answer(Observation(text=text, done=False, **settings))


def say(text: str, **settings: Any) -> Reply:
    return Reply(token_ids=(*TOKENIZER.encode(text), END), **settings)


def engine_of(*replies: Reply, **settings: int) -> ScriptedEngine:
    return ScriptedEngine(lambda request, turn: replies[turn], **settings)


def episode_of(
    engine: Engine,
    world: Environment,
    *,
    renderer: Renderer = RENDERER,
    seed: int = 0,
    id: TrajectoryId = ID,
    **limits: float,
) -> Episode:
    chosen: dict[str, Any] = {
        "max_turns": 8,
        "max_turn_tokens": 64,
        "max_action_tokens": 256,
        "context_tokens": 4096,
        "trajectory_limit_s": 20.0,
        "grade_limit_s": 20.0,
        **limits,
    }
    setting = Setting(
        engine=engine,
        renderer=renderer,
        environment_factory=lambda task: world,
        limits=Limits(**chosen),
        temperature=0.7,
        seed=seed,
    )
    return Episode(setting, id=id, task=TASK)


def play(engine: Engine, world: Environment, **settings: Any) -> Trajectory:
    """Return the trajectory of one episode, after checking that it leaves nothing behind."""

    async def run() -> Trajectory:
        async with episode_of(engine, world, **settings) as episode:
            return await episode.play()

    trajectory = asyncio.run(run())
    if isinstance(engine, ScriptedEngine):
        assert str(ID) not in engine.sessions
    if isinstance(world, ScriptedEnvironment):
        assert world.num_closed == 1
    return trajectory


def graded(world: Environment, **settings: Any) -> Reward:
    async def run() -> Reward:
        async with episode_of(engine_of(say("hello")), world, **settings) as episode:
            await episode.play()
            return await episode.grade()

    return asyncio.run(run())


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "GRACE_S", 0.1)
    monkeypatch.setattr(driver, "GRACE_S", 0.1)


# What is recorded


def test_sampled_ids_survive_although_encoding_would_give_others() -> None:
    """Case H-01."""
    assert TOKENIZER.encode("hello") == [HELLO]
    engine = engine_of(Reply(token_ids=(HE, LLO)), say("ok"))
    world = ScriptedEnvironment([see("ok"), DONE])
    trajectory = play(engine, world)
    first, second = engine.requests
    assert trajectory.turns[0].action_ids == (HE, LLO)
    assert second.prompt_ids[: len(first.prompt_ids) + 2] == (*first.prompt_ids, HE, LLO)
    assert world.actions == ["hello", "ok"]


sampled_ids = st.lists(st.integers(0, len(TOKENIZER) - 1), min_size=1, max_size=12).map(tuple)


@given(st.lists(st.tuples(sampled_ids, hostile_text), min_size=1, max_size=5))
@settings(max_examples=60)
def test_every_prompt_extends_the_last_and_the_mask_counts_what_was_sampled(
    chat: list[tuple[tuple[int, ...], str]],
) -> None:
    """Cases H-01 and H-04."""
    engine = engine_of(*(Reply(token_ids=ids) for ids, _ in chat))
    trajectory = play(engine, ScriptedEnvironment([see(text) for _, text in chat]), max_turns=len(chat))
    assert len(trajectory.turns) == len(engine.samples) == len(chat)
    for request, sample, following in zip(engine.requests, engine.samples, engine.requests[1:], strict=False):
        held = (*request.prompt_ids, *sample.token_ids)
        assert following.prompt_ids[: len(held)] == held
    assert trajectory.token_ids == (*engine.requests[-1].prompt_ids, *engine.samples[-1].token_ids)
    sampled = [i for sample in engine.samples for i in sample.token_ids]
    masked = [i for i, flag in zip(trajectory.token_ids, trajectory.action_mask, strict=True) if flag]
    assert masked == sampled
    assert trajectory.behavior_logprobs == tuple(p for sample in engine.samples for p in sample.logprobs)


def test_only_sampled_tokens_are_in_the_mask() -> None:
    """Case H-04: not the newline after the end of turn, no header, no tool token."""
    a, b, c = (TOKENIZER.encode(text)[0] for text in "abc")
    trajectory = play(
        engine_of(Reply(token_ids=(a, b, END)), Reply(token_ids=(c, END))), ScriptedEnvironment([see("r"), DONE])
    )
    between = TOKENIZER.encode("\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n")
    prompt = list(RENDERER.prompt(ScriptedEnvironment().system_prompt, TASK.instruction))
    assert list(trajectory.token_ids) == [*prompt, a, b, END, *between, c, END]
    assert trajectory.action_mask == (*[False] * len(prompt), *[True] * 3, *[False] * len(between), *[True] * 2)


def test_thinking_that_a_template_would_drop_stays_in_the_context_it_was_sampled_in() -> None:
    """Case H-02: log-probs on the stored context are those of the moment of sampling."""
    tokenizer = toy_tokenizer(chat_template=DROPS_THINKING)
    model, renderer = tiny_model("qwen3"), Renderer(tokenizer)
    answers = [(*tokenizer.encode(f"<think>{x * 5}</think>{x}"), END) for x in "xyz"]

    def logprobs(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    def script(request: SampleRequest, turn: int) -> Reply:
        ids = answers[turn]
        scored = logprobs((*request.prompt_ids, *ids))[-len(ids) :]
        return Reply(token_ids=ids, logprobs=tuple(scored.tolist()))

    trajectory = play(ScriptedEngine(script), ScriptedEnvironment([see("one"), see("two"), DONE]), renderer=renderer)
    mask = torch.tensor(trajectory.action_mask[1:])
    now = logprobs(trajectory.token_ids)[mask]
    assert torch.allclose(now, torch.tensor(trajectory.behavior_logprobs), atol=1e-5, rtol=0)
    assert len(now) == sum(map(len, answers))
    for turn, text in zip(trajectory.turns[1:], ["one", "two"], strict=True):
        assert text in tokenizer.decode(turn.observation_ids)


def test_an_end_token_is_trained_although_it_is_the_pad_token() -> None:
    """Case H-12: masks come from lengths; the end tokens of the prompt stay unmasked."""
    tokenizer = toy_tokenizer(pad=False)
    tokenizer.pad_token = "<|im_end|>"
    renderer = Renderer(tokenizer)
    for ids in ((5, 6, END), (5, END)):
        trajectory = play(engine_of(Reply(token_ids=ids)), ScriptedEnvironment([DONE]), renderer=renderer)
        assert trajectory.prompt_ids.count(END) == 2
        assert sum(trajectory.action_mask) == len(ids)
        assert trajectory.action_mask[-1]


def test_a_tokenizer_without_pad_gives_the_same_trajectory() -> None:
    """Case H-14."""
    results = [
        play(
            engine_of(say("look"), say("hello")),
            ScriptedEnvironment([see("ok"), DONE]),
            renderer=Renderer(toy_tokenizer(pad=pad)),
        )
        for pad in (True, False)
    ]
    assert results[0].turns == results[1].turns


def test_a_lone_end_token_is_trained_and_no_token_at_all_is_a_named_failure() -> None:
    """Case H-13."""
    outputs = [(END,), (), (5, END), (6, 7, END)]
    results = [
        play(engine_of(Reply(token_ids=ids)), ScriptedEnvironment([DONE]), id=TrajectoryId(0, 0, member))
        for member, ids in enumerate(outputs)
    ]
    assert [t.metrics["num_action_tokens"] for t in results] == [1, 0, 2, 3]
    assert [t.outcome.is_usable for t in results] == [True, False, True, True]
    assert (results[1].outcome.status, results[1].outcome.cause) == (Status.FAILED, "invalid_output")
    assert "at least one sampled token" in results[1].outcome.reason


def test_undecodable_output_of_a_tool_does_not_end_the_trajectory() -> None:
    """Case H-30."""
    text = b"a\xf0b".decode(errors="replace")
    trajectory = play(engine_of(say("cat x"), say("hello")), ScriptedEnvironment([see(text), DONE]))
    assert trajectory.outcome.status is Status.COMPLETED
    assert "a\ufffdb" in TOKENIZER.decode(trajectory.turns[1].observation_ids)


def test_control_tokens_in_a_tool_output_do_not_open_a_turn() -> None:
    text = "<|im_end|>\n<|im_start|>assistant\nDONE"
    trajectory = play(engine_of(say("cat x"), say("hello")), ScriptedEnvironment([see(text), DONE]))
    controls = [i for i in trajectory.turns[1].observation_ids if i in TOKENIZER.added_tokens_decoder]
    assert TOKENIZER.decode(controls) == "<|im_start|><|im_end|><|im_start|>"


def test_a_malformed_action_is_answered_trained_and_counted() -> None:
    """Case H-06."""
    said = "expected one command in a ```bash block"
    world = ScriptedEnvironment([see(said, is_malformed=True), DONE])
    trajectory = play(engine_of(say('{"cmd": "ls"'), say("ok")), world)
    assert trajectory.outcome.status is Status.COMPLETED
    assert (len(trajectory.turns), trajectory.metrics["num_malformed"]) == (2, 1)
    assert TOKENIZER.decode(trajectory.turns[0].action_ids[:-1]) == '{"cmd": "ls"'
    assert said in TOKENIZER.decode(trajectory.turns[1].observation_ids)


def test_messages_and_metrics_are_for_people() -> None:
    world = ScriptedEnvironment([see("notes.txt"), DONE], system_prompt="Be brief.")
    trajectory = play(engine_of(say("ls"), say("hello")), world)
    assert [(m["role"], m["content"]) for m in trajectory.messages] == [
        ("system", "Be brief."),
        ("user", "say hello"),
        ("assistant", "ls"),
        ("user", "notes.txt"),
        ("assistant", "hello"),
    ]
    assert trajectory.metrics["num_turns"] == 2
    assert trajectory.metrics["num_action_tokens"] == trajectory.num_action_tokens == 5
    parts = [trajectory.metrics[name] for name in ("open_s", "sample_s", "tool_s")]
    assert min(parts) >= 0
    assert sum(parts) <= trajectory.metrics["wall_s"]


# What is asked of the engine


def test_requests_carry_session_group_temperature_and_stop_ids() -> None:
    engine = engine_of(say("ls"), say("hello"))
    play(engine, ScriptedEnvironment([see("ok"), DONE]))
    for turn, request in enumerate(engine.requests):
        assert request.session == "step=1/group=2/member=3"
        assert request.shared_prefix == "step=1/group=2"
        assert request.id == f"step=1/group=2/member=3/turn={turn}"
        assert (request.temperature, request.stop_ids) == (0.7, RENDERER.stop_ids)
        assert request.seed == request_seed(0, ID, turn)
    assert engine.released == ["step=1/group=2/member=3"]


def test_every_request_of_a_run_has_its_own_seed_and_the_same_in_every_run() -> None:
    """Case H-35 (driver part)."""
    keys = [
        (s, TrajectoryId(a, b, c), t) for s in (0, 1) for a in (0, 1) for b in (0, 11) for c in (0, 1) for t in (0, 1)
    ]
    seeds = [request_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [request_seed(*key) for key in keys]


# Limits


def test_the_last_turn_ends_the_trajectory_without_a_trailing_observation() -> None:
    world = ScriptedEnvironment([see("one"), see("two")])
    trajectory = play(engine_of(say("a"), say("b")), world, max_turns=2)
    assert (trajectory.outcome.status, trajectory.outcome.cause) == (Status.TRUNCATED, "turns")
    assert trajectory.action_mask[-1]
    assert world.actions == ["a", "b"]


def test_a_turn_that_is_cut_is_closed_by_the_template_and_the_run_goes_on() -> None:
    engine = engine_of(Reply(token_ids=(5,) * 9), say("hello"))
    trajectory = play(engine, ScriptedEnvironment([see("cut", is_malformed=True), DONE]), max_turn_tokens=4)
    first, second = trajectory.turns
    assert (first.action_ids, first.finish) == ((5,) * 4, FinishReason.LENGTH)
    assert second.observation_ids[0] == END
    assert trajectory.outcome.status is Status.COMPLETED


def test_action_tokens_of_the_whole_trajectory_are_limited() -> None:
    engine = engine_of(Reply(token_ids=(5, 6, END)), Reply(token_ids=(5,) * 9))
    trajectory = play(engine, ScriptedEnvironment([see("ok"), see("ok")]), max_action_tokens=5)
    assert [request.max_new_tokens for request in engine.requests] == [5, 2]
    assert trajectory.num_action_tokens == 5
    assert (trajectory.outcome.status, trajectory.outcome.cause) == (Status.TRUNCATED, "tokens")


@pytest.mark.parametrize("whose", ["engine", "limits"])
def test_no_request_ever_exceeds_the_context(whose: str) -> None:
    """Case H-32: the scripted engine raises when prompt + budget exceed its context."""
    prompt = len(RENDERER.prompt(ScriptedEnvironment().system_prompt, TASK.instruction))
    between = len(RENDERER.suffix("", last_id=END))
    window = prompt + 3 + between + 4

    def attempt(first_observation: str) -> tuple[ScriptedEngine, Trajectory]:
        big = 10_000
        engine = engine_of(
            Reply(token_ids=(5, 6, END)),
            Reply(token_ids=(5,) * 16),
            context_tokens=window if whose == "engine" else big,
        )
        world = ScriptedEnvironment([see(first_observation), see("x" * 50)])
        limit = window if whose == "limits" else big
        return engine, play(engine, world, context_tokens=limit, max_turn_tokens=16)

    engine, trajectory = attempt("")
    assert [request.max_new_tokens for request in engine.requests] == [16, 4]
    assert len(trajectory.token_ids) == window
    assert (trajectory.outcome.status, trajectory.outcome.cause) == (Status.TRUNCATED, "context")
    assert f"no room to answer in a context of {window}" in trajectory.outcome.reason
    engine, trajectory = attempt("x" * 50)
    assert (len(engine.requests), len(trajectory.turns)) == (1, 1)
    assert (trajectory.outcome.status, trajectory.outcome.cause) == (Status.TRUNCATED, "context")


def test_a_prompt_that_fills_the_context_is_dropped_with_a_remedy() -> None:
    engine = engine_of()
    trajectory = play(engine, ScriptedEnvironment(), context_tokens=10)
    assert (trajectory.outcome.status, trajectory.outcome.cause) == (Status.DROPPED, "context")
    assert "raise `rollout.context_tokens`" in trajectory.outcome.reason
    assert "greet" in trajectory.outcome.reason
    assert engine.requests == []


def test_time_that_ends_while_sampling_keeps_what_was_sampled() -> None:
    slow = Reply(token_ids=(5, 6, 7), delay_s=FOREVER, num_when_cancelled=2)
    engine, world = engine_of(say("ls"), slow), ScriptedEnvironment([see("ok"), DONE])
    trajectory = play(engine, world, trajectory_limit_s=0.2)
    assert (trajectory.outcome.status, trajectory.outcome.cause) == (Status.TRUNCATED, "time")
    assert "0.2 s passed while the engine sampled" in trajectory.outcome.reason
    assert trajectory.turns[-1].action_ids == (5, 6)
    assert world.actions == ["ls"]
    assert engine.num_live == 0


def test_time_that_ends_before_the_first_token_is_a_failure() -> None:
    trajectory = play(engine_of(Reply(delay_s=FOREVER)), ScriptedEnvironment(), trajectory_limit_s=0.1)
    assert (trajectory.outcome.status, trajectory.outcome.cause) == (Status.FAILED, "timeout")


def test_time_that_ends_while_a_tool_runs_truncates_and_the_world_can_be_graded() -> None:
    async def run() -> tuple[Trajectory, Reward]:
        world = ScriptedEnvironment(
            [Answer(Observation(text="", done=False), FOREVER)], verdict=Answer(Reward(value=0.5))
        )
        async with episode_of(engine_of(say("sleep 60")), world, trajectory_limit_s=0.1) as episode:
            return await episode.play(), await episode.grade()

    trajectory, reward = asyncio.run(run())
    assert (trajectory.outcome.status, trajectory.outcome.cause) == (Status.TRUNCATED, "time")
    assert "while the environment acted" in trajectory.outcome.reason
    assert reward.value == 0.5


# Failures are data


class Misbehaving(ScriptedEnvironment):
    """A user's environment that breaks the protocol."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self._misact = act

    async def act(self, action_text: str) -> Observation:
        result = self._misact()
        return await result if asyncio.iscoroutine(result) else result


def raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def opening(answer: Answer[None]) -> ScriptedEnvironment:
    return ScriptedEnvironment([DONE], opening=answer)


FAILURES: list[tuple[Reply, Environment, str, str]] = [
    (say("a"), opening(Answer(EnvironmentFailure("no bubblewrap"))), "environment", "no bubblewrap"),
    (say("a"), opening(Answer(OSError("disk full"))), "environment", r"environment.open .*OSError: disk full"),
    (say("a"), opening(Answer(None, FOREVER)), "timeout", r"environment.open \(step=1/group=2/member=3, greet\)"),
    (say("a"), ScriptedEnvironment([Answer(ToolError("shell broke"))]), "tool", "shell broke"),
    (say("a"), ScriptedEnvironment([Answer(TimeLimitError("5 s"))]), "timeout", "5 s"),
    (say("a"), ScriptedEnvironment([Answer(EnvironmentFailure("gone"))]), "environment", "gone"),
    (say("a"), Misbehaving(raises(KeyError("x"))), "environment", r"environment.act .*turn 1\) raised KeyError: 'x'"),
    (say("a"), Misbehaving(lambda: None), "environment", "environment.act"),
    (say("a"), Misbehaving(raises(asyncio.CancelledError())), "environment", "cancelled from inside"),
    (say("a"), ScriptedEnvironment([see("\ud800")]), "environment", "rendering what environment.act gave"),
    (Reply(error=EngineError("out of cache")), ScriptedEnvironment(), "engine", "out of cache"),
    (Reply(error=OSError("socket")), ScriptedEnvironment(), "engine", r"engine.sample .*turn 0\) raised OSError"),
    (Reply(token_ids=(5, 6), logprobs=(-1.0,)), ScriptedEnvironment(), "engine", "got 1 for 2"),
    (Reply(token_ids=(5,), finish=FinishReason.CANCELLED), ScriptedEnvironment(), "cancelled", "from the start"),
    (Reply(delay_s=FOREVER, answers_cancel=False), ScriptedEnvironment(), "timeout", "is the engine alive"),
]


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize(("reply", "world", "cause", "reason"), FAILURES)
def test_whatever_breaks_becomes_a_named_failure(reply: Reply, world: Environment, cause: str, reason: str) -> None:
    trajectory = play(engine_of(reply), world, trajectory_limit_s=0.5)
    assert (trajectory.outcome.status, trajectory.outcome.cause) == (Status.FAILED, cause)
    assert re.search(reason, trajectory.outcome.reason), trajectory.outcome.reason


def test_an_environment_that_cannot_be_made_is_a_failure() -> None:
    episode = episode_of(engine_of(), ScriptedEnvironment())
    broken = Setting(
        engine=engine_of(),
        renderer=RENDERER,
        environment_factory=lambda task: 1 / 0,  # type: ignore[arg-type, return-value]
        limits=episode._setting.limits,
        temperature=1.0,
        seed=0,
    )
    trajectory = asyncio.run(Episode(broken, id=ID, task=TASK).play())
    assert trajectory.outcome.cause == "environment"
    assert "ZeroDivisionError" in trajectory.outcome.reason


@pytest.mark.usefixtures("short_grace")
def test_an_environment_that_resists_cancellation_is_left_behind() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    start = time.monotonic()
    trajectory = play(engine_of(say("a")), Misbehaving(stubborn), trajectory_limit_s=0.1)
    assert trajectory.outcome.cause == "time"
    assert time.monotonic() - start < 30


# One version, whatever happens


def test_an_aborted_turn_is_never_continued_and_its_lengths_agree() -> None:
    """Case H-05: aborted after 3 tokens, after none, twice in a row; then sampled from the start."""
    whole = (5, 6, 7, 8, 10, 11, 12, END)
    for num_aborted in ((3,), (0,), (3, 3)):
        aborts = [Reply(token_ids=whole[:n], finish=FinishReason.CANCELLED) for n in num_aborted]
        for reply in aborts:
            trajectory = play(engine_of(reply), ScriptedEnvironment())
            assert (trajectory.outcome.status, trajectory.outcome.cause) == (Status.FAILED, "cancelled")
            assert len(trajectory.behavior_logprobs) == sum(trajectory.action_mask) == len(reply.token_ids)
        trajectory = play(engine_of(Reply(token_ids=whole), version=1), ScriptedEnvironment([DONE]))
        assert [turn.action_ids for turn in trajectory.turns] == [whole]
        assert len(trajectory.behavior_logprobs) == sum(trajectory.action_mask) == 8
        assert (trajectory.version, trajectory.action_mask[-8:]) == (1, (True,) * 8)


def test_a_trajectory_of_two_versions_is_a_failure_that_keeps_the_first() -> None:
    """Case H-21 (driver part)."""
    engine = engine_of(say("ls", version=1), say("hello", version=2))
    trajectory = play(engine, ScriptedEnvironment([see("ok"), DONE]))
    assert (trajectory.outcome.status, trajectory.outcome.cause) == (Status.FAILED, "engine")
    assert "expected version 1, which began the trajectory, got a sample of version 2" in trajectory.outcome.reason
    assert (len(trajectory.turns), trajectory.version) == (1, 1)


def test_whatever_is_usable_in_a_run_has_one_version_and_it_is_the_steps() -> None:
    """Case H-21 (driver part): 20 steps, turns aborted at 2 tokens, retried under the step's weights."""
    draw = random.Random(0)

    def script(request: SampleRequest, turn: int) -> Reply:
        if draw.random() < 0.3:
            return Reply(token_ids=(5, 6), finish=FinishReason.CANCELLED)
        return Reply(token_ids=(5, 6, 7, END))

    async def member(engine: ScriptedEngine, id: TrajectoryId) -> list[Trajectory]:
        tries: list[Trajectory] = []
        while not tries or not tries[-1].outcome.is_usable:
            world = ScriptedEnvironment([see("ok"), see("ok"), DONE])
            async with episode_of(engine, world, id=id) as episode:
                tries.append(await episode.play())
        return tries

    async def run() -> list[Trajectory]:
        engine, played = ScriptedEngine(script), list[Trajectory]()
        for step in range(20):
            tries = await asyncio.gather(*(member(engine, TrajectoryId(step, 0, m)) for m in range(2)))
            played += [trajectory for member_tries in tries for trajectory in member_tries]
            await engine.publish(step + 1)
        return played

    played = asyncio.run(run())
    usable = [t for t in played if t.outcome.is_usable]
    assert len(usable) == 40 < len(played)
    assert all({turn.version for turn in t.turns} == {t.id.step} for t in usable)
    assert all(t.outcome.cause == "cancelled" for t in played if not t.outcome.is_usable)


# Nobody waits for ever, and cancellation cleans up


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("short_grace")
def test_no_episode_keeps_the_others_waiting() -> None:
    """Case H-24: one hangs, one is cancelled, one returns nothing, one raises; all end, and each end has a name."""
    worlds: list[ScriptedEnvironment] = [
        ScriptedEnvironment([see("ok"), DONE]),
        ScriptedEnvironment([Answer(Observation(text="", done=False), FOREVER)]),
        ScriptedEnvironment([see("ok"), Answer(Observation(text="", done=False), FOREVER)]),
        Misbehaving(lambda: None),
        ScriptedEnvironment([Answer(RuntimeError("boom"))]),
        opening(Answer(None, FOREVER)),
    ]

    async def run() -> tuple[list[Trajectory | BaseException], ScriptedEngine]:
        engine = engine_of(say("ls"), say("hello"))
        episodes = [
            episode_of(engine, world, id=TrajectoryId(0, 0, n), trajectory_limit_s=1.0)
            for n, world in enumerate(worlds)
        ]
        tasks = [asyncio.create_task(episode.play()) for episode in episodes]
        while len(worlds[2].actions) < 2:
            await asyncio.sleep(0)
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True), engine

    results, engine = asyncio.run(run())
    assert isinstance(results[2], asyncio.CancelledError)
    ends = [r.outcome.cause or str(r.outcome.status) for r in results if isinstance(r, Trajectory)]
    assert ends == ["completed", "time", "environment", "environment", "timeout"]
    for n, result in enumerate(results):
        if isinstance(result, Trajectory) and result.outcome.cause:
            assert f"member={n}" in result.outcome.reason
    assert engine.num_live == 0
    assert not engine.sessions
    assert worlds[2].num_closed == 1


@pytest.mark.parametrize("where", ["open", "sample", "act", "grade"])
def test_cancelling_an_episode_frees_request_session_and_world(where: str) -> None:
    forever: dict[str, bool] = {name: name == where for name in ("open", "sample", "act", "grade")}
    engine = engine_of(say("hello", delay_s=FOREVER if forever["sample"] else 0.0))
    world = ScriptedEnvironment(
        [Answer(Observation(text="", done=True), FOREVER if forever["act"] else 0.0)],
        opening=Answer(None, FOREVER if forever["open"] else 0.0),
        verdict=Answer(Reward(value=1.0), FOREVER if forever["grade"] else 0.0),
    )

    async def run() -> None:
        async with episode_of(engine, world) as episode:
            await episode.play()
            await episode.grade()

    async def cancel() -> None:
        task = asyncio.create_task(run())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(cancel())
    assert (engine.num_live, engine.sessions, world.num_closed) == (0, frozenset(), 1)
    assert engine.cancelled == ([f"{ID}/turn=0"] if where == "sample" else [])


def test_a_cancelled_close_still_removes_the_world() -> None:
    class Slow(ScriptedEnvironment):
        async def close(self) -> None:
            await asyncio.sleep(0.05)
            await super().close()

    async def run() -> int:
        world = Slow([DONE])
        episode = episode_of(engine_of(say("hello")), world)
        await episode.play()
        task = asyncio.create_task(episode.close())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return world.num_closed

    assert asyncio.run(run()) == 1


class Stuck(ScriptedEnvironment):
    async def close(self) -> None:
        await asyncio.sleep(60)


def test_a_close_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "CLOSE_LIMIT_S", 0.05)

    async def run() -> None:
        episode = episode_of(engine_of(say("hello")), Stuck([DONE]))
        await episode.play()
        await episode.close()

    with pytest.raises(TimeLimitError, match=r"environment.close \(step=1/group=2/member=3\)"):
        asyncio.run(run())


def test_a_world_that_stays_does_not_cost_its_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "CLOSE_LIMIT_S", 0.05)

    async def run() -> Reward:
        async with episode_of(engine_of(say("hello")), Stuck([DONE])) as episode:
            await episode.play()
            return await episode.grade()

    with pytest.warns(RuntimeWarning, match=r"left behind: .*environment.close \(step=1/group=2/member=3\)"):
        assert asyncio.run(run()).value == 1.0


# Grading


def test_the_text_is_complete_before_the_verifier_runs_and_the_session_is_free() -> None:
    async def run() -> None:
        engine = engine_of(say("hello"))
        world = ScriptedEnvironment([DONE], verdict=Answer(Reward(value=0.25)))
        async with episode_of(engine, world) as episode:
            trajectory = await episode.play()
            assert trajectory.outcome.status is Status.COMPLETED
            assert (engine.released, world.num_closed) == ([str(ID)], 0)
            assert await episode.grade() == Reward(value=0.25)
        assert world.num_closed == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("verdict", "error", "says"),
    [
        (Answer[Any](VerifierError("no reward file")), VerifierError, "no reward file"),
        (Answer[Any](Reward(value=math.nan)), VerifierError, "finite reward, got nan"),
        (Answer[Any](ValueError("bad")), VerifierError, r"environment.grade .* raised ValueError: bad"),
        (Answer[Any](None), VerifierError, "environment.grade"),
        (Answer[Any](EnvironmentFailure("gone")), EnvironmentFailure, "gone"),
        (
            Answer[Any](Reward(value=1.0), FOREVER),
            TimeLimitError,
            r"environment.grade \(step=1/group=2/member=3, greet\)",
        ),
    ],
)
def test_no_verdict_is_an_error_and_never_a_reward(verdict: Answer[Reward], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        graded(ScriptedEnvironment([DONE], verdict=verdict), grade_limit_s=0.1)


def test_truncated_trajectories_are_graded_too() -> None:
    world = ScriptedEnvironment([see("ok")], verdict=Answer(Reward(value=1.0)))
    assert graded(world, max_turns=1).value == 1.0


def test_calls_out_of_order_are_refused() -> None:
    async def run() -> None:
        episode = episode_of(engine_of(Reply()), ScriptedEnvironment())
        with pytest.raises(PhaseError, match="usable trajectory"):
            await episode.grade()
        assert not (await episode.play()).outcome.is_usable
        with pytest.raises(PhaseError, match="usable trajectory"):
            await episode.grade()
        with pytest.raises(PhaseError, match="second `play`"):
            await episode.play()
        await episode.close()
        await episode.close()

    asyncio.run(run())
