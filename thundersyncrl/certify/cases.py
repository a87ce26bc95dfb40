"""The step that is certified: its trajectories, its lost members, and its rewards of several kinds."""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thundersyncrl.records import GroupId, Outcome, Status, Task, Trajectory, TrajectoryId, Turn


class RewardKind(enum.StrEnum):
    """What the drawn rewards look like."""

    GRADED = "graded"
    """From 0 to 1, with equal ones among them."""
    BINARY = "binary"
    """0 or 1."""
    OFFSET = "offset"
    """10,000 + U(0, 1): all that counts is in the last digits of a float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The trajectories of one step and their rewards."""

    trajectories: tuple[Trajectory, ...]
    rewards: Mapping[TrajectoryId, float]
    """A trajectory without one is lost: it counts nowhere."""

    @property
    def groups(self) -> dict[GroupId, list[Trajectory]]:
        """All members by group, in order."""
        by_group: dict[GroupId, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            by_group.setdefault(trajectory.id.group_id, []).append(trajectory)
        return by_group

    @property
    def lost(self) -> frozenset[TrajectoryId]:
        return frozenset(t.id for t in self.trajectories) - self.rewards.keys()


_Shape = tuple[tuple[int, int], ...]
"""(observation tokens, action tokens) of each turn; the first observation is the prompt's own length."""

_GROUPS: tuple[tuple[int, tuple[_Shape, ...]], ...] = (
    # a shared prompt; one to three turns; the last member is lost
    (7, (((7, 3),), ((7, 2), (3, 4)), ((7, 5), (1, 1), (2, 3)), ((7, 4),), ((7, 1), (4, 2)), ((7, 3), (2, 2)))),
    # a prompt of one token, which leaves nothing to share; a trajectory of one token; one that sampled none
    (1, (((1, 1),), ((1, 4), (2, 3)), ((1, 2),), ((1, 0),))),
    # equal rewards
    (4, (((4, 3),), ((4, 1), (1, 2)))),
)
_LOST = TrajectoryId(0, 0, 5)
_UNIFORM_GROUP = 2


def tiny_trajectories(*, vocab_size: int, seed: int) -> tuple[Trajectory, ...]:
    """Return a step of three ragged groups with random tokens: several turns, a lone token, an empty trajectory."""
    draw = random.Random(seed)
    trajectories: list[Trajectory] = []
    for group, (num_prompt, shapes) in enumerate(_GROUPS):
        prompt = tuple(draw.randrange(vocab_size) for _ in range(num_prompt))
        for member, shape in enumerate(shapes):
            turns = tuple(_turn(draw, vocab_size, prompt if k == 0 else (), *sizes) for k, sizes in enumerate(shape))
            trajectories.append(_trajectory(TrajectoryId(0, group, member), turns))
    return tuple(trajectories)


def _turn(draw: random.Random, vocab_size: int, prompt: tuple[int, ...], num_observed: int, num_acted: int) -> Turn:
    observed = prompt or tuple(draw.randrange(vocab_size) for _ in range(num_observed))
    acted = tuple(draw.randrange(vocab_size) for _ in range(num_acted))
    logprobs = tuple(draw.uniform(-6.0, -2.0) for _ in acted)
    return Turn(observation_ids=observed, action_ids=acted, behavior_logprobs=logprobs, version=0)


def _trajectory(id: TrajectoryId, turns: tuple[Turn, ...]) -> Trajectory:
    lost = id == _LOST
    outcome = Outcome(status=Status.FAILED if lost else Status.COMPLETED, cause="verifier" if lost else "")
    return Trajectory(id=id, task=Task(id=f"task-{id.group}", instruction=""), turns=turns, outcome=outcome)


def tiny_batch(trajectories: Sequence[Trajectory], kind: RewardKind, *, seed: int) -> Batch:
    """Return the tiny step with drawn rewards: one group's are equal, one member has none."""
    draw = random.Random(seed)
    rewards: dict[TrajectoryId, float] = {}
    for trajectory in trajectories:
        id = trajectory.id
        if id == _LOST:
            continue
        if kind is RewardKind.BINARY:
            # one success among five leaves pass@4 a signal
            rewards[id] = float(id.member == 2 or id.group == _UNIFORM_GROUP)
        else:
            rewards[id] = 0.5 if id.group == _UNIFORM_GROUP else draw.random()
    if kind is not RewardKind.BINARY:
        rewards[TrajectoryId(0, 0, 3)] = rewards[TrajectoryId(0, 0, 1)]
    return Batch(trajectories=tuple(trajectories), rewards=_with_offset(rewards, kind))


def drawn_batch(trajectories: Sequence[Trajectory], kind: RewardKind, *, seed: int) -> Batch:
    """Return sampled trajectories with drawn rewards, so that every group has a signal; failed ones are lost.

    Graded rewards are U(0, 1); of binary ones, one per group is 1.
    """
    draw = random.Random(seed)
    usable = [t for t in trajectories if t.outcome.is_usable and t.turns]
    rewards: dict[TrajectoryId, float] = {t.id: draw.random() for t in usable}
    if kind is RewardKind.BINARY:
        best: dict[GroupId, float] = {}
        for id, reward in rewards.items():
            best[id.group_id] = max(reward, best.get(id.group_id, 0.0))
        rewards = {id: float(reward == best[id.group_id]) for id, reward in rewards.items()}
    return Batch(trajectories=tuple(trajectories), rewards=_with_offset(rewards, kind))


def _with_offset(rewards: Mapping[TrajectoryId, float], kind: RewardKind) -> dict[TrajectoryId, float]:
    return {id: reward + 10_000.0 * (kind is RewardKind.OFFSET) for id, reward in rewards.items()}
