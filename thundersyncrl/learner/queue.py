"""The learner's work queue: what may run now under a stream level, in which class, packed in tokens.

| class   | when                                                    | run as                                       |
| ------- | ------------------------------------------------------- | -------------------------------------------- |
| final   | the coefficient is known                                | across groups, coefficient 0 never           |
| known   | own reward is in, the coefficient isn't                 | members of one group with one reward         |
| content | text complete, no reward yet                            | one trajectory                               |
| early   | turns finished, text not complete                       | forward only, one trajectory's new tokens    |

A stream level says when an item is admitted (`batch`: every reward of the step is in, `group`: of the group,
`trajectory`, `turn` and `auto`: at once); the class says what can be done with it. So all levels are one code path.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from thundersyncrl.algorithms.estimator import CoefficientClass
from thundersyncrl.errors import ContractError, PhaseError
from thundersyncrl.learner.branch import BranchTokens
from thundersyncrl.records import GroupId, TrajectoryId


class WorkClass(enum.StrEnum):
    """What can be done with an item, in the order in which it is done. Early forwards aren't in the queue: they leave
    no gradient (`early.py`)."""

    FINAL = "final"
    KNOWN = "known"
    CONTENT = "content"
    EARLY = "early"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Branches that run in one forward and backward."""

    work_class: WorkClass
    branches: tuple[BranchTokens, ...]
    coefficients: tuple[float, ...]
    """Final: each branch's advantage. Else ones: the plain sum of score gradients is wanted."""

    @property
    def num_tokens(self) -> int:
        return sum(b.num_tokens for b in self.branches)


@dataclass(slots=True)
class GroupWork:
    """What has arrived of one group."""

    id: GroupId
    members: set[TrajectoryId]
    """Announced and not lost."""
    branches: dict[TrajectoryId, BranchTokens] = field(default_factory=dict[TrajectoryId, BranchTokens])
    rewards: dict[TrajectoryId, float] = field(default_factory=dict[TrajectoryId, float])
    pending: set[TrajectoryId] = field(default_factory=set[TrajectoryId])
    """Text complete, gradient not taken."""
    advantages: dict[TrajectoryId, float] = field(default_factory=dict[TrajectoryId, float])
    """Filled as coefficients become known."""

    @property
    def is_complete(self) -> bool:
        """True when every member that wasn't lost has its text and its reward."""
        return len(self.rewards) == len(self.members) == len(self.branches)

    @property
    def differs(self) -> bool:
        """True when two rewards differ, so that the group can't end uniform any more."""
        return len(set(self.rewards.values())) > 1

    @property
    def survivors(self) -> list[TrajectoryId]:
        """Members with a reward, in member order."""
        return sorted(self.rewards)


class WorkQueue:
    """Items of one step, handed out as packs.

    Args:
        stream: "batch", "group", "trajectory", "turn" or "auto".
        coefficient: class of the estimator; it decides when a coefficient is known.
        pack_tokens: largest pack; a single longer branch runs alone.
    """

    def __init__(self, *, stream: str, coefficient: CoefficientClass, pack_tokens: int):
        self._stream = stream
        self._coefficient = coefficient
        self._pack_tokens = pack_tokens
        self.groups: dict[GroupId, GroupWork] = {}
        self.is_sealed = False

    def open_group(self, group: GroupId, members: Iterable[TrajectoryId]) -> None:
        """Announce a group; refused once the step is sealed."""
        if self.is_sealed:
            raise PhaseError(f"expected groups before the step is sealed, got {group} after it")
        self.groups[group] = GroupWork(group, set(members))

    def seal(self) -> None:
        """Say that no more groups come."""
        self.is_sealed = True

    def clear(self) -> None:
        """Start a new step."""
        self.groups, self.is_sealed = {}, False

    def _member(self, member: TrajectoryId) -> GroupWork:
        work = self.groups.get(member.group_id)
        if work is None or member not in work.members:
            raise ContractError(f"expected a trajectory that was announced, got {member}")
        return work

    def add_text(self, branch: BranchTokens) -> None:
        """Add a trajectory whose text is complete."""
        work = self._member(branch.id)
        if branch.id in work.branches:
            raise ContractError(f"expected each trajectory's text once, got {branch.id} twice")
        sibling = next((b for b in work.branches.values() if b.target_ids), None)
        if branch.target_ids and sibling:
            self.refuse_other_prompt(branch, sibling.prefix_ids)
        work.branches[branch.id] = branch
        if branch.target_ids:  # a trajectory without action tokens has no gradient, its reward counts all the same
            work.pending.add(branch.id)

    @staticmethod
    def refuse_other_prompt(branch: BranchTokens, prefix_ids: tuple[int, ...]) -> None:
        """Raise unless a branch has the prompt that its siblings have."""
        if branch.prefix_ids != prefix_ids:
            raise ContractError(
                f"expected the members of {branch.id.group_id} to share their prompt, {branch.id} has another than its "
                "siblings; give tasks whose prompt varies a group of their own"
            )

    def refuse_ended(self, member: TrajectoryId) -> None:
        """Raise unless a member was announced and its text is still to come."""
        if member in self._member(member).branches:
            raise ContractError(
                f"expected a trajectory's turns before its complete text, got a turn of {member} after it"
            )

    def with_text(self, member: TrajectoryId) -> GroupWork:
        """Return the group of a member whose text is in; a reward before it is refused."""
        work = self._member(member)
        if member not in work.branches:
            raise ContractError(f"expected a trajectory's text before its reward, got the reward of {member} first")
        return work

    def add_reward(self, member: TrajectoryId, reward: float) -> None:
        """Add a trajectory's reward."""
        work = self._member(member)
        if member in work.rewards:
            raise ContractError(f"expected each reward once, got a second one for {member}")
        work.rewards[member] = reward

    def lose(self, member: TrajectoryId) -> None:
        """Take out a member that will never have a reward."""
        work = self._member(member)
        if member in work.rewards:
            raise ContractError(f"expected a member without a reward, got {member}, which has one")
        work.members.discard(member)
        work.branches.pop(member, None)
        work.pending.discard(member)

    @property
    def is_complete(self) -> bool:
        """True when the step is sealed and every reward that will come has come."""
        return self.is_sealed and all(g.is_complete for g in self.groups.values())

    def knows_coefficients(self, work: GroupWork) -> bool:
        """Return whether the group's coefficients can be computed now."""
        if self._coefficient is CoefficientClass.AFFINE_BATCH:
            return self.is_complete
        return work.is_complete

    def _admitted(self) -> Iterator[GroupWork]:
        for work in self.groups.values():
            ready = {"batch": self.is_complete, "group": work.is_complete}.get(self._stream, True)
            if ready and work.pending:
                yield work

    def next_pack(self, may_buffer: Callable[[GroupId], bool], *, sure_only: bool = False) -> Pack | None:
        """Return the pack to run now, in class order, or None.

        Args:
            may_buffer: whether a group may hold gradient buffers; if not, its work waits until it is final.
            sure_only: nothing that may turn out to be for nothing. A group whose rewards are equal so far can still
                end uniform, and its gradients are then dropped.
        """
        admitted = list(self._admitted())
        pack = self._final_pack(admitted)
        if pack is not None:
            return pack
        open_groups = [g for g in admitted if may_buffer(g.id) and (g.differs or not sure_only)]
        return self._known_pack(open_groups) or (None if sure_only else self._content_pack(open_groups))

    def _final_pack(self, admitted: list[GroupWork]) -> Pack | None:
        items: list[tuple[BranchTokens, float]] = []
        for work in admitted:
            for member in sorted(work.pending):
                if member not in work.advantages:
                    continue
                if work.advantages[member] == 0.0:
                    work.pending.discard(member)  # never forwarded
                else:
                    items.append((work.branches[member], work.advantages[member]))
        chosen = _fill(items, self._pack_tokens)
        if not chosen:
            return None
        branches, coefficients = zip(*chosen, strict=True)
        return Pack(work_class=WorkClass.FINAL, branches=branches, coefficients=coefficients)

    def _known_pack(self, groups: list[GroupWork]) -> Pack | None:
        bundles: list[tuple[bool, list[BranchTokens]]] = []
        for work in groups:
            by_reward: dict[float, list[BranchTokens]] = {}
            for member in sorted(work.pending & work.rewards.keys()):
                by_reward.setdefault(work.rewards[member], []).append(work.branches[member])
            bundles += [(work.differs, bundle) for bundle in by_reward.values()]
        if not bundles:
            return None
        _, best = max(bundles, key=lambda b: (b[0], len(b[1])))
        chosen = _fill([(b, 1.0) for b in best], self._pack_tokens)
        branches = tuple(b for b, _ in chosen)
        return Pack(work_class=WorkClass.KNOWN, branches=branches, coefficients=(1.0,) * len(branches))

    def _content_pack(self, groups: list[GroupWork]) -> Pack | None:
        for work in groups:
            for member in sorted(work.pending):
                return Pack(work_class=WorkClass.CONTENT, branches=(work.branches[member],), coefficients=(1.0,))
        return None

    def has_runnable(self, may_buffer: Callable[[GroupId], bool], *, sure_only: bool = False) -> bool:
        """Return whether `next_pack` has something to give."""
        return any(
            any(work.advantages.get(m) for m in work.pending)
            or (may_buffer(work.id) and self._is_open(work, sure_only=sure_only))
            for work in self._admitted()
        )

    @staticmethod
    def _is_open(work: GroupWork, *, sure_only: bool) -> bool:
        waiting = work.pending - work.advantages.keys()
        return bool(waiting & work.rewards.keys()) and work.differs if sure_only else bool(waiting)


def _fill(items: list[tuple[BranchTokens, float]], budget: int) -> list[tuple[BranchTokens, float]]:
    """Return the first items that fit the budget in tokens, at least one if there is any."""
    chosen: list[tuple[BranchTokens, float]] = []
    tokens = 0
    for branch, coefficient in items:
        if chosen and tokens + branch.num_tokens > budget:
            break
        chosen.append((branch, coefficient))
        tokens += branch.num_tokens
    return chosen
