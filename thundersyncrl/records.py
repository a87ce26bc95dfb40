"""The frozen records that travel between modules.

Shapes: G group, K turns, T tokens. Log-probs in nats, durations in seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from thundersyncrl.errors import ContractError


@dataclass(frozen=True, slots=True, order=True)
class GroupId:
    """Identity of one group: the trajectories of one task in one step.

    Example:
        >>> str(GroupId(3, 5))
        'step=3/group=5'
    """

    step: int
    group: int

    def __str__(self) -> str:
        return f"step={self.step}/group={self.group}"


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryId:
    """Identity of one trajectory in a run.

    Example:
        >>> str(TrajectoryId(3, 5, 2)), TrajectoryId(3, 5, 2).group_id
        ('step=3/group=5/member=2', GroupId(step=3, group=5))
    """

    step: int
    group: int
    member: int

    @property
    def group_id(self) -> GroupId:
        return GroupId(self.step, self.group)

    def __str__(self) -> str:
        return f"step={self.step}/group={self.group}/member={self.member}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an agent is asked to do, and where its environment and verifier lie."""

    id: str
    """Unique in its task set; the folder's name for Harbor tasks."""
    instruction: str
    """What the agent reads."""
    folder: Path | None = None
    """The Harbor task folder; None for tasks that live in code."""
    kind: str = ""
    """Family of the task, such as "archives"; reports are broken down by it."""
    difficulty: str = ""
    """"easy", "medium" or "hard"."""
    several_turns: bool = False
    """True when the task can't be solved without looking first."""


class FinishReason(enum.StrEnum):
    """Why the engine stopped sampling a turn."""

    STOP = "stop"
    """A stop token or stop string was sampled."""
    LENGTH = "length"
    """The token budget of the request is used up."""
    CANCELLED = "cancelled"
    """The caller cancelled the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Observation tokens that the policy read, then the action tokens that it sampled.

    Raises:
        ContractError: log-probs and action tokens differ in number.
    """

    observation_ids: tuple[int, ...]
    """[T_obs] tokens since the previous action; for the first turn the whole prompt."""
    action_ids: tuple[int, ...]
    """[T_act] tokens exactly as sampled, stop token included. May be empty."""
    behavior_logprobs: tuple[float, ...]
    """[T_act] log-prob of each action token under the distribution it was sampled from."""
    version: int
    """Policy version that sampled it."""
    finish: FinishReason = FinishReason.STOP

    def __post_init__(self) -> None:
        if len(self.action_ids) != len(self.behavior_logprobs):
            raise ContractError(
                f"expected one behavior log-prob per action token, got {len(self.behavior_logprobs)} for "
                f"{len(self.action_ids)} tokens; pass both exactly as the engine returned them"
            )


class Status(enum.StrEnum):
    """How a trajectory ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    FAILED = "failed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a trajectory ended, and why.

    `cause` is the limit for TRUNCATED ("turns", "tokens", "context", "time"), the failure kind for FAILED
    ("engine", "environment", "tool", "verifier", "timeout", "crash", "invalid_output", "cancelled") and empty for
    COMPLETED.
    """

    status: Status
    cause: str = ""
    reason: str = ""

    @property
    def is_usable(self) -> bool:
        """True when the trajectory's text may be trained on once it has a reward."""
        return self.status in (Status.COMPLETED, Status.TRUNCATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The ordered turns of one environment until it ended.

    Raises:
        ContractError: the turns were sampled by more than one policy version.
    """

    id: TrajectoryId
    task: Task
    turns: tuple[Turn, ...]
    outcome: Outcome
    messages: tuple[Mapping[str, str], ...] = ()
    """The chat as text (role, content), for people to read; never encoded again."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds and counts of this trajectory, such as `tool_s` or `num_malformed`."""

    def __post_init__(self) -> None:
        if len({turn.version for turn in self.turns}) > 1:
            versions = sorted({turn.version for turn in self.turns})
            raise ContractError(
                f"expected one policy version per trajectory, got {versions} ({self.id}); "
                "sample it again from the start under one version"
            )

    @property
    def version(self) -> int:
        """Policy version that sampled every action token; -1 without turns."""
        return self.turns[0].version if self.turns else -1

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """[T_prompt] tokens shared with the other members of the group."""
        return self.turns[0].observation_ids if self.turns else ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """[T] every token in order: prompt, action, observation, action, ..."""
        return tuple(i for t in self.turns for ids in (t.observation_ids, t.action_ids) for i in ids)

    @property
    def action_mask(self) -> tuple[bool, ...]:
        """[T] True exactly on sampled tokens."""
        return tuple(
            flag for t in self.turns for flag in (*[False] * len(t.observation_ids), *[True] * len(t.action_ids))
        )

    @property
    def behavior_logprobs(self) -> tuple[float, ...]:
        """[T_act] log-probs of all action tokens in order."""
        return tuple(p for t in self.turns for p in t.behavior_logprobs)

    @property
    def num_action_tokens(self) -> int:
        return sum(len(t.action_ids) for t in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A verifier's verdict. No verdict is an error of its own, never the value 0."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """An engine's confirmation that a policy version is live."""

    version: int
    digest: str
    """Fingerprint of the weights that the engine samples from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did; every launched trajectory is in exactly one count."""

    step: int
    version: int
    """Policy version that sampled and was trained; the step publishes version + 1."""
    num_launched: int
    num_trained: int
    """Trajectories whose gradient entered the update, those with coefficient zero included."""
    num_dropped: int
    num_failed: int
    failures: Mapping[str, int]
    """Count by failure kind; sums to `num_failed`."""
    metrics: Mapping[str, float]
    level: str = ""
    """The streaming level at which the learner worked; with "auto" also why, behind a colon."""

    def __post_init__(self) -> None:
        accounted = self.num_trained + self.num_dropped + self.num_failed
        if accounted != self.num_launched:
            raise ContractError(
                f"expected every launched trajectory accounted for, got {accounted} of {self.num_launched} "
                f"(step={self.step}); a trajectory was lost between rollout and learner"
            )
