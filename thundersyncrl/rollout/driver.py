"""Plays one trajectory: opens the world, then samples, acts and appends until done or at a limit.

Whatever goes wrong becomes the trajectory's `Outcome`. Only cancellation passes through, once all is freed.

| who     | waits for                    | released by                                         |
| ------- | ---------------------------- | --------------------------------------------------- |
| `play`  | the world to open, each act  | the environment, or the trajectory's time limit     |
| `play`  | each sample                  | the engine, or the time limit, which cancels it     |
| `grade` | the verifier                 | the environment, or the grading limit               |
| `close` | the world to be removed      | the environment, or `CLOSE_LIMIT_S`                 |
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Self

from thundersyncrl.environments.environment import Environment, Observation
from thundersyncrl.errors import (
    EngineError,
    EnvironmentFailure,
    InvalidOutputError,
    PhaseError,
    RolloutError,
    TimeLimitError,
    VerifierError,
)
from thundersyncrl.observe.events import record
from thundersyncrl.records import (
    FinishReason,
    Outcome,
    Reward,
    Status,
    Task,
    Trajectory,
    TrajectoryId,
    Turn,
)
from thundersyncrl.rollout.boundary import GRACE_S, attributed, outcome_of, result_of, stop, within
from thundersyncrl.rollout.engine import Sample, SampleRequest, request_seed
from thundersyncrl.rollout.setting import Setting

CLOSE_LIMIT_S = 30.0
"""How long an environment may take to remove its world."""


class Episode:
    """One trajectory in its world. Play it, hand its text on, then grade it, then close it.

    The world stays open between `play` and `grade`, so that learning can begin before the verifier runs. Leaving
    the block closes it; a world that can't be removed is then a RuntimeWarning, as no trajectory is at fault.

        async with Episode(setting, id=id, task=task) as episode:
            trajectory = await episode.play()
            ...
            reward = await episode.grade()

    Args:
        on_turn: hears of all turns so far when one more is sampled, before the environment acts on it.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        id: TrajectoryId,
        task: Task,
        on_turn: Callable[[TrajectoryId, Sequence[Turn]], None] | None = None,
    ) -> None:
        self._setting = setting
        self._id = id
        self._task = task
        self._on_turn = on_turn
        self._environment: Environment | None = None
        self._trajectory: Trajectory | None = None
        self._turns: list[Turn] = []
        self._messages: list[dict[str, str]] = []
        self._seconds = {"open_s": 0.0, "sample_s": 0.0, "tool_s": 0.0, "wall_s": 0.0}
        self._num_malformed = 0
        self._deadline = math.inf

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # The trajectory and its reward are already with their owner: a world that won't go must not take them along.
        try:
            await self.close()
        except RolloutError as error:
            warnings.warn(f"a world was left behind: {error}", RuntimeWarning, stacklevel=2)

    async def play(self) -> Trajectory:
        """Return the trajectory, however it ended; its text is complete and the engine's session is released.

        A usable trajectory has at least one action token. One that reaches a limit is TRUNCATED and may be
        graded; one whose prompt leaves no room in the context is DROPPED; a turn of zero tokens makes it
        FAILED ("invalid_output"), so its reward isn't in the group's statistics either.

        Raises:
            PhaseError: played before.
            asyncio.CancelledError: after the request, the session and the world are gone.
        """
        if self._deadline != math.inf:
            raise PhaseError(f"expected an unplayed episode, got a second `play` ({self._id}); make another")
        start = time.monotonic()
        self._deadline = start + self._setting.limits.trajectory_limit_s
        try:
            outcome = await self._play()
        except asyncio.CancelledError:
            with contextlib.suppress(RolloutError):
                await self.close()
            raise
        except Exception as error:  # the boundary: a failure is data
            outcome = outcome_of(error)
        finally:
            self._setting.engine.release(str(self._id))
        self._seconds["wall_s"] = time.monotonic() - start
        how = f"{outcome.status} ({outcome.cause})" if outcome.cause else str(outcome.status)
        self._record(start, "trajectory", tokens=self._num_action_tokens, detail=how)
        self._trajectory = Trajectory(
            id=self._id,
            task=self._task,
            turns=tuple(self._turns),
            outcome=outcome,
            messages=tuple(self._messages),
            metrics={
                "num_turns": len(self._turns),
                "num_action_tokens": self._num_action_tokens,
                "num_malformed": self._num_malformed,
                **self._seconds,
            },
        )
        return self._trajectory

    async def grade(self) -> Reward:
        """Return the verifier's verdict on the world as the trajectory left it.

        Raises:
            PhaseError: not played, or the trajectory isn't usable.
            VerifierError: no verdict, or one that isn't a finite number.
            TimeLimitError: no verdict within the grading limit.
            RolloutError: the environment failed in another way; `outcome_of` says how it counts.
        """
        if self._environment is None or self._trajectory is None or not self._trajectory.outcome.is_usable:
            raise PhaseError(f"expected an open episode with a usable trajectory, got a call of `grade` ({self._id})")
        limit_s = self._setting.limits.grade_limit_s
        what = f"environment.grade ({self._id}, {self._task.id})"
        with self._timed("verifier") as details, attributed(VerifierError, what):
            reward = await within(self._environment.grade(), limit_s=limit_s, what=what)
            if not math.isfinite(reward.value):
                raise VerifierError(f"expected a finite reward, got {reward.value} ({what})")
            details.append(repr(float(reward.value)))
        return reward

    async def close(self) -> None:
        """Remove the world. Idempotent; a cancellation waits until that is done.

        Raises:
            TimeLimitError: the world isn't gone within `CLOSE_LIMIT_S`.
            EnvironmentFailure: the environment raised.
        """
        environment, self._environment = self._environment, None
        if environment is None:
            return
        what = f"environment.close ({self._id})"
        task = asyncio.ensure_future(within(environment.close(), limit_s=CLOSE_LIMIT_S, what=what))
        with self._timed("environment close"), attributed(EnvironmentFailure, what):
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                await asyncio.wait({task})
                raise

    @property
    def _num_action_tokens(self) -> int:
        return sum(len(turn.action_ids) for turn in self._turns)

    @property
    def _num_tokens(self) -> int:
        return self._num_action_tokens + sum(len(turn.observation_ids) for turn in self._turns)

    @property
    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @property
    def _is_out_of_time(self) -> bool:
        return self._left_s < 1e-3  # a wait may end one clock tick before its limit

    async def _play(self) -> Outcome:
        environment = await self._open()
        observation_ids = self._setting.renderer.prompt(environment.system_prompt, self._task.instruction)
        self._note("system", environment.system_prompt)
        self._note("user", self._task.instruction)
        while (end := self._limit_before(observation_ids)) is None:
            turn = await self._sample(observation_ids)
            if turn.action_ids:
                self._turns.append(turn)
            if turn.finish is FinishReason.CANCELLED:
                return self._cut_short()
            if not turn.action_ids:
                raise InvalidOutputError(
                    f"expected at least one sampled token, got none ({self._where}); nothing can be trained"
                )
            if self._on_turn is not None:
                self._on_turn(self._id, self._turns)  # its forward may run while the tool does
            try:
                observation = await self._act(environment, turn)
            except TimeLimitError:
                if not self._is_out_of_time:  # the environment's own limit, not ours
                    raise
                return self._out_of_time("the environment acted")
            if observation.done:
                return Outcome(status=Status.COMPLETED)
            with attributed(EnvironmentFailure, f"rendering what environment.act gave ({self._where})"):
                observation_ids = self._setting.renderer.suffix(observation.text, last_id=turn.action_ids[-1])
        return end

    @property
    def _where(self) -> str:
        return f"{self._id}, turn {len(self._turns)}"

    def _record(self, start_s: float, what: str, *, tokens: int = 0, detail: str = "") -> None:
        actor = "controller" if what in ("sample", "trajectory") else "sandbox"
        log, id = self._setting.events, self._id
        record(log, start_s, actor, what, step=id.step, trajectory=str(id), tokens=tokens, detail=detail)

    @contextlib.contextmanager
    def _timed(self, what: str, key: str = "") -> Generator[list[str], None, None]:
        start, details = time.monotonic(), list[str]()
        try:
            yield details
        finally:
            if key:
                self._seconds[key] += time.monotonic() - start
            self._record(start, what, detail="".join(details))

    def _note(self, role: str, content: str) -> None:
        self._messages.append({"role": role, "content": content})

    async def _open(self) -> Environment:
        what = f"environment.open ({self._id}, {self._task.id})"
        with self._timed("environment open", "open_s"), attributed(EnvironmentFailure, what):
            self._environment = self._setting.environment_factory(self._task)
            await within(self._environment.open(), limit_s=self._left_s, what=what)
        return self._environment

    async def _act(self, environment: Environment, turn: Turn) -> Observation:
        action = self._setting.renderer.text(turn.action_ids)
        self._note("assistant", action)
        what = f"environment.act ({self._where})"
        with self._timed("tool", "tool_s"), attributed(EnvironmentFailure, what):
            observation = await within(environment.act(action), limit_s=self._left_s, what=what)
            self._num_malformed += observation.is_malformed
        if not observation.done:
            self._note("user", observation.text)
        return observation

    def _limit_before(self, observation_ids: tuple[int, ...]) -> Outcome | None:
        """Return how the trajectory ends if another turn isn't possible, None if it is."""
        limits = self._setting.limits
        if len(self._turns) >= limits.max_turns:
            return _truncated("turns", f"all {limits.max_turns} turns are used")
        if self._num_action_tokens >= limits.max_action_tokens:
            return _truncated("tokens", f"all {limits.max_action_tokens} action tokens are used")
        if self._room(observation_ids) < 1:
            num_tokens = self._num_tokens + len(observation_ids)
            reason = f"{num_tokens} tokens leave no room to answer in a context of {self._context_tokens}"
            if self._turns:
                return _truncated("context", reason)
            reason = f"the prompt's {reason} ({self._task.id}); raise `rollout.context_tokens`"
            return Outcome(status=Status.DROPPED, cause="context", reason=reason)
        if self._is_out_of_time:
            return self._out_of_time("turns were taken")
        return None

    @property
    def _context_tokens(self) -> int:
        return min(self._setting.engine.context_tokens, self._setting.limits.context_tokens)

    def _room(self, observation_ids: tuple[int, ...]) -> int:
        return self._context_tokens - self._num_tokens - len(observation_ids)

    async def _sample(self, observation_ids: tuple[int, ...]) -> Turn:
        limits, turn = self._setting.limits, len(self._turns)
        history = (i for t in self._turns for ids in (t.observation_ids, t.action_ids) for i in ids)
        request = SampleRequest(
            id=f"{self._id}/turn={turn}",
            session=str(self._id),
            prompt_ids=(*history, *observation_ids),
            max_new_tokens=min(
                limits.max_turn_tokens,
                limits.max_action_tokens - self._num_action_tokens,
                self._room(observation_ids),
            ),
            temperature=self._setting.temperature,
            seed=request_seed(self._setting.seed, self._id, turn),
            stop_ids=self._setting.renderer.stop_ids,
            shared_prefix=str(self._id.group_id),
        )
        with self._timed("sample", "sample_s"), attributed(EngineError, f"engine.sample ({self._where})"):
            return self._checked(observation_ids, await self._ask(request))

    async def _ask(self, request: SampleRequest) -> Sample:
        """Return the sample; at the time limit cancel the request and return what there is."""
        engine = self._setting.engine
        task = asyncio.ensure_future(engine.sample(request))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._left_s)
            if not done:
                engine.cancel(request.id)
                done, _ = await asyncio.wait({task}, timeout=GRACE_S)
        except asyncio.CancelledError:
            engine.cancel(request.id)
            await stop(task)
            raise
        if not done:
            await stop(task)
            raise TimeLimitError(
                "expected engine.sample to end within the trajectory's "
                f"{self._setting.limits.trajectory_limit_s:g} s, or {GRACE_S:g} s after a cancel, got none "
                f"({self._where}); is the engine alive?"
            )
        return result_of(task)

    def _checked(self, observation_ids: tuple[int, ...], sample: Sample) -> Turn:
        if self._turns and sample.version != self._turns[0].version:
            raise EngineError(
                f"expected version {self._turns[0].version}, which began the trajectory, got a sample of "
                f"version {sample.version} ({self._where}); sample it again from the start"
            )
        if len(sample.token_ids) != len(sample.logprobs):
            raise EngineError(
                f"expected one log-prob per sampled token, got {len(sample.logprobs)} for "
                f"{len(sample.token_ids)} ({self._where})"
            )
        return Turn(
            observation_ids=observation_ids,
            action_ids=sample.token_ids,
            behavior_logprobs=sample.logprobs,
            version=sample.version,
            finish=sample.finish,
        )

    def _cut_short(self) -> Outcome:
        if self._is_out_of_time:
            return self._out_of_time("the engine sampled")
        reason = f"the engine was told to cancel the request ({self._where}); sample it again from the start"
        return Outcome(status=Status.FAILED, cause="cancelled", reason=reason)

    def _out_of_time(self, doing: str) -> Outcome:
        reason = f"{self._setting.limits.trajectory_limit_s:g} s passed while {doing} ({self._where})"
        if self._turns:
            return _truncated("time", reason)
        return Outcome(status=Status.FAILED, cause="timeout", reason=reason)


def _truncated(cause: str, reason: str) -> Outcome:
    return Outcome(status=Status.TRUNCATED, cause=cause, reason=reason)
