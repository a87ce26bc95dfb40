"""The score-gradient ledger: sums of score gradients of one policy version that wait for their late coefficients.

A source is the score gradient H of one or several trajectories, over the trained parameters and, behind them, over
the boundary tensors of their group's prompt (the adjoints): both are linear, so both wait in the same accumulators
and meet the same coefficients. Everything is summed in at least float32.

| coefficient class | kept per open group                                  |
| ----------------- | ---------------------------------------------------- |
| known             | nothing (a source without a reward is held)          |
| affine_group      | sum H and sum (r - r_first) H                        |
| affine_batch      | the same for boundary tensors; parameters: one pair in all |
| by_value          | one sum per distinct reward                          |
| arbitrary         | one source per trajectory                            |

Subtracting the group's first landed reward before folding costs nothing and keeps offsets from cancelling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from thundersyncrl.algorithms.coefficient_check import affine_coefficients, check_class
from thundersyncrl.algorithms.estimator import CoefficientClass
from thundersyncrl.errors import ContractError, PhaseError, StaleWorkError
from thundersyncrl.records import GroupId, TrajectoryId

Source = list[Tensor]


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which gradients of a tensor are summed: its own, but at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _owned(source: Iterable[Tensor]) -> Source:
    return [t.detach().to(accumulation_dtype(t)).contiguous() for t in source]


def _scaled(source: Sequence[Tensor], factor: float) -> Source:
    return list(torch._foreach_mul(list(source), factor)) if source else []  # pyright: ignore


def _add(total: Source, source: Sequence[Tensor], factor: float = 1.0) -> None:
    if factor != 0.0 and total:
        torch._foreach_add_(total, list(source), alpha=factor)  # pyright: ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """The advantages of the trajectories whose rewards are compared, checked against the declared class."""

    rewards: Mapping[TrajectoryId, float]
    advantages: Mapping[TrajectoryId, float]

    @property
    def alpha(self) -> float:
        """Slope of the advantage in the reward; 0 for equal rewards."""
        order = list(self.rewards)
        slope, _ = affine_coefficients([self.rewards[i] for i in order], [self.advantages[i] for i in order])
        return slope


class _Accumulator(Protocol):
    @property
    def is_filled(self) -> bool: ...

    def fold(self, member: TrajectoryId, reward: float, source: Source) -> None: ...

    def combine(self, coefficients: Coefficients) -> Source: ...


@dataclass(slots=True)
class _Pair:
    """sum H and sum (r - r_first) H."""

    first: TrajectoryId | None = None
    first_reward: float = 0.0
    plain: Source = field(default_factory=list[Tensor])
    weighted: Source = field(default_factory=list[Tensor])

    @property
    def is_filled(self) -> bool:
        return self.first is not None

    def fold(self, member: TrajectoryId, reward: float, source: Source) -> None:
        if self.first is None:
            self.first, self.first_reward, self.plain = member, reward, source
            return
        offset = reward - self.first_reward
        if offset and self.weighted:
            _add(self.weighted, source, offset)
        elif offset:
            self.weighted = _scaled(source, offset)
        _add(self.plain, source)

    def combine(self, coefficients: Coefficients) -> Source:
        if self.first is None:
            return []
        total = _scaled(self.plain, coefficients.advantages[self.first])
        if self.weighted:
            _add(total, self.weighted, coefficients.alpha)
        return total


@dataclass(slots=True)
class _Table:
    """One sum per key: per distinct reward, or per trajectory."""

    key: Callable[[TrajectoryId, float], object]
    sums: dict[object, tuple[TrajectoryId, Source]] = field(default_factory=dict[object, tuple[TrajectoryId, Source]])

    @property
    def is_filled(self) -> bool:
        return bool(self.sums)

    def fold(self, member: TrajectoryId, reward: float, source: Source) -> None:
        key = self.key(member, reward)
        if key in self.sums:
            _add(self.sums[key][1], source)
        else:
            self.sums[key] = (member, source)

    def combine(self, coefficients: Coefficients) -> Source:
        total: Source = []
        for member, source in self.sums.values():
            advantage = coefficients.advantages[member]
            if not total:
                total = _scaled(source, advantage)
            else:
                _add(total, source, advantage)
        return total


def _accumulator(coefficient: CoefficientClass) -> _Accumulator:
    if coefficient in (CoefficientClass.AFFINE_GROUP, CoefficientClass.AFFINE_BATCH):
        return _Pair()
    if coefficient is CoefficientClass.BY_VALUE:
        return _Table(key=lambda _, reward: reward)
    return _Table(key=lambda member, _: member)


@dataclass(slots=True)
class _OpenGroup:
    members: set[TrajectoryId]
    folded: _Accumulator
    held: dict[TrajectoryId, Source] = field(default_factory=dict[TrajectoryId, Source])
    counted: set[TrajectoryId] = field(default_factory=set[TrajectoryId])
    """Members whose source is in: held, folded or added with its final coefficient."""
    boundary: Source = field(default_factory=list[Tensor])
    """Adjoints that came with their final coefficient."""


class Ledger:
    """Accumulators of one policy version. Misuse raises; nothing is ever silently dropped or counted twice.

    Args:
        parameters: trained tensors, in the order in which sources list them.
        coefficient: class declared by the estimator.
    """

    def __init__(self, parameters: Sequence[Tensor], coefficient: CoefficientClass):
        self._coefficient = coefficient
        self._num_parameters = len(parameters)
        self._total = [torch.zeros_like(p, dtype=accumulation_dtype(p)) for p in parameters]
        self._batch_pair = _Pair()
        self._groups: dict[GroupId, _OpenGroup] = {}
        self._closed: set[GroupId] = set()
        self._version: int | None = None
        self._has_signal = False

    def begin(self, version: int) -> None:
        """Start the step of a policy version.

        Raises:
            PhaseError: the last step isn't settled.
        """
        if self._version is not None:
            raise PhaseError(f"expected version {self._version} settled before {version} begins; call settle() first")
        self._version = version

    def open_group(self, group: GroupId, members: Iterable[TrajectoryId]) -> None:
        """Announce a group and its members.

        Raises:
            ContractError: the group was opened before.
        """
        if group in self._groups or group in self._closed:
            raise ContractError(f"expected a new group, got {group}, which was opened before")
        self._groups[group] = _OpenGroup(set(members), _accumulator(self._coefficient))

    @property
    def num_buffered_groups(self) -> int:
        """Open groups that hold gradient-sized buffers."""
        return sum(self.holds_buffers(g) for g in self._groups)

    def holds_buffers(self, group_id: GroupId) -> bool:
        """Return whether an open group holds gradient-sized buffers."""
        group = self._groups.get(group_id)
        return group is not None and (bool(group.held) or group.folded.is_filled)

    def hold(self, member: TrajectoryId, source: Iterable[Tensor], *, version: int) -> None:
        """Keep the source of a trajectory whose reward isn't known yet; `bind` folds it."""
        group = self._claim([member], version)
        group.held[member] = _owned(source)

    def bind(self, member: TrajectoryId, reward: float, *, coefficient: float | None = None) -> None:
        """Fold a held source, now that its reward is known.

        Args:
            member: whose source is held.
            reward: its own.
            coefficient: final, where the reward alone decides it (class `known`): the source then needs no buffer.

        Raises:
            ContractError: no source of this member is held.
        """
        group = self._group(member.group_id)
        if member not in group.held:
            raise ContractError(f"expected a held source, got none ({member}); hold() comes before bind(), once")
        source = group.held.pop(member)
        if coefficient is None:
            self._fold(group, member, reward, source)
        elif coefficient != 0.0:  # else it carries no signal, as if it had never been forwarded
            self._add_final(_scaled(source, coefficient), group)

    def _add_final(self, source: Source, group: _OpenGroup) -> None:
        _add(self._total, source[: self._num_parameters])
        self._has_signal = True
        self._add_boundary(group, source[self._num_parameters :])

    @staticmethod
    def _add_boundary(group: _OpenGroup, adjoints: Sequence[Tensor]) -> None:
        if group.boundary:
            _add(group.boundary, adjoints)
        else:
            group.boundary = _owned(adjoints)

    def fold(self, members: Sequence[TrajectoryId], reward: float, source: Iterable[Tensor], *, version: int) -> None:
        """Add the summed source of members of one group that share one reward, before their coefficient is known."""
        group = self._claim(members, version)
        self._fold(group, members[0], reward, _owned(source))

    def _fold(self, group: _OpenGroup, member: TrajectoryId, reward: float, source: Source) -> None:
        if self._coefficient is CoefficientClass.AFFINE_BATCH:
            self._batch_pair.fold(member, reward, source[: self._num_parameters])
            source = source[self._num_parameters :]
        group.folded.fold(member, reward, source)

    def add(
        self,
        members: Sequence[TrajectoryId],
        parameters: Sequence[Tensor],
        boundaries: Mapping[GroupId, Sequence[Tensor]],
        *,
        version: int,
    ) -> None:
        """Add gradients that already carry their final coefficients.

        Args:
            members: whose trajectories they are; of any open groups.
            parameters: summed over the members.
            boundaries: adjoints by group.
            version: policy version at which they were taken.
        """
        by_group: dict[GroupId, list[TrajectoryId]] = {}
        for member in members:
            by_group.setdefault(member.group_id, []).append(member)
        for of_group in by_group.values():
            self._claim(of_group, version)
        _add(self._total, parameters)
        self._has_signal = True
        for group_id, adjoints in boundaries.items():
            self._add_boundary(self._groups[group_id], adjoints)

    def discard(self, member: TrajectoryId) -> None:
        """Forget a member that failed before its reward; a source that waits for it is dropped."""
        group = self._group(member.group_id)
        if member in group.counted and member not in group.held:
            raise ContractError(f"expected a member without a reward, got one that was folded ({member})")
        group.held.pop(member, None)
        group.counted.discard(member)
        group.members.discard(member)

    def close(self, group_id: GroupId, coefficients: Coefficients) -> Source:
        """Combine a group's sums with its coefficients; return the adjoints that its prompt must be walked with.

        For `affine_batch` the coefficients are the whole step's. An empty list means that nothing reaches the prompt.

        Raises:
            PhaseError: the group is closed, or sources still wait for their reward.
            CoefficientClassError: the advantages aren't of the declared class.
        """
        group = self._group(group_id)
        if group.held:
            raise PhaseError(f"expected every reward bound before {group_id} closes, {sorted(group.held)[0]} has none")
        check_coefficients(self._coefficient, coefficients, where=str(group_id))
        del self._groups[group_id]
        self._closed.add(group_id)
        if not any(coefficients.advantages[m] for m in group.members if m in coefficients.advantages):
            return group.boundary
        combined = group.folded.combine(coefficients)
        if combined and self._coefficient is not CoefficientClass.AFFINE_BATCH:
            _add(self._total, combined[: self._num_parameters])
            self._has_signal = True
            combined = combined[self._num_parameters :]
        if group.boundary and combined:
            _add(combined, group.boundary)
        return combined or group.boundary

    def close_batch(self, coefficients: Coefficients) -> None:
        """Combine the step-wide pair of `affine_batch`; without effect for the other classes."""
        combined = self._batch_pair.combine(coefficients) if any(coefficients.advantages.values()) else []
        if combined:
            _add(self._total, combined)
            self._has_signal = True

    def add_walked(self, parameters: Sequence[Tensor]) -> None:
        """Add the gradient of a walked prompt."""
        _add(self._total, parameters)

    def settle(self, scale: float) -> list[Tensor]:
        """Return the step's gradient, scaled once, and start anew; empty when nothing carried a signal.

        Raises:
            PhaseError: groups are open, or the step never began.
        """
        if self._version is None:
            raise PhaseError("expected a step that began, got none; call begin() first")
        if self._groups:
            names = ", ".join(str(g) for g in list(self._groups)[:3])
            raise PhaseError(f"expected every group closed before the step, {len(self._groups)} are open ({names})")
        total = _scaled(self._total, scale) if self._has_signal else []
        if self._has_signal:
            torch._foreach_zero_(self._total)  # pyright: ignore
        self._batch_pair, self._closed = _Pair(), set()
        self._version, self._has_signal = None, False
        return total

    def _group(self, group_id: GroupId) -> _OpenGroup:
        if group_id in self._closed:
            raise PhaseError(f"expected an open group, got {group_id}, which is closed; a group closes once")
        if group_id not in self._groups:
            raise ContractError(f"expected a group that was opened, got {group_id}")
        return self._groups[group_id]

    def _claim(self, members: Sequence[TrajectoryId], version: int) -> _OpenGroup:
        if version != self._version:
            raise StaleWorkError(
                f"expected work of policy version {self._version}, got version {version} ({members[0]}); "
                "sample it again, it must not be trained on"
            )
        group = self._group(members[0].group_id)
        for member in members:
            if member.group_id != members[0].group_id or member not in group.members:
                raise ContractError(f"expected a member of {members[0].group_id}, got {member}")
            if member in group.counted:
                raise ContractError(f"expected each trajectory once, got {member} twice")
        group.counted.update(members)
        return group


def check_coefficients(coefficient: CoefficientClass, coefficients: Coefficients, *, where: str) -> None:
    """Raise CoefficientClassError unless the advantages are of the declared class on the rewards that came."""
    order = list(coefficients.rewards)
    if not order:  # every member was lost
        return
    check_class(
        coefficient,
        [coefficients.rewards[i] for i in order],
        [coefficients.advantages[i] for i in order],
        where=where,
    )
