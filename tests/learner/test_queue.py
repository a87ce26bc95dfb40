from __future__ import annotations

import random

import pytest

from tests.learner.builders import trajectory
from thundersyncrl.algorithms.estimator import CoefficientClass
from thundersyncrl.errors import ContractError, PhaseError
from thundersyncrl.learner.branch import BranchTokens, branch_tokens
from thundersyncrl.learner.queue import WorkClass, WorkQueue
from thundersyncrl.records import GroupId, TrajectoryId


def member(index: int, group: int = 0) -> TrajectoryId:
    return TrajectoryId(0, group, index)


def branch(index: int, group: int = 0, *, num_actions: int = 2, prompt: int = 1) -> BranchTokens:
    """Branch tokens: as many as actions."""
    return branch_tokens(trajectory([([prompt, 2, 3], [4] * num_actions)], group=group, member=index))


def queue(
    stream: str = "trajectory",
    *,
    coefficient: CoefficientClass = CoefficientClass.AFFINE_GROUP,
    pack_tokens: int = 100,
    groups: int = 1,
    size: int = 3,
) -> WorkQueue:
    made = WorkQueue(stream=stream, coefficient=coefficient, pack_tokens=pack_tokens)
    for group in range(groups):
        made.open_group(GroupId(0, group), [member(i, group) for i in range(size)])
    return made


def anyone(group: GroupId) -> bool:
    return True


def no_one(group: GroupId) -> bool:
    return False


def complete(q: WorkQueue, group: int = 0, *, rewards: tuple[float, ...] = (1.0, 0.0, 0.5)) -> None:
    for index, reward in enumerate(rewards):
        q.add_text(branch(index, group))
        q.add_reward(member(index, group), reward)


def test_trajectory_level_admits_a_text_at_once() -> None:
    q = queue("trajectory")
    assert not q.has_runnable(anyone)
    q.add_text(branch(1))
    pack = q.next_pack(anyone)
    assert pack is not None
    assert (pack.work_class, [b.id for b in pack.branches], pack.coefficients) == (
        WorkClass.CONTENT,
        [member(1)],
        (1.0,),
    )


def test_group_level_waits_for_the_rewards_of_the_group() -> None:
    q = queue("group", groups=2)
    for index in range(3):
        q.add_text(branch(index))
    q.add_reward(member(0), 1.0)
    q.add_reward(member(1), 0.0)
    assert q.next_pack(anyone) is None
    assert not q.has_runnable(anyone)
    q.add_reward(member(2), 0.5)
    assert q.has_runnable(anyone)


def test_batch_level_waits_for_the_seal_and_every_reward() -> None:
    q = queue("batch", groups=2)
    complete(q, 0)
    q.seal()
    assert q.next_pack(anyone) is None
    complete(q, 1)
    assert q.has_runnable(anyone)
    unsealed = queue("batch")
    complete(unsealed)
    assert unsealed.next_pack(anyone) is None


def test_final_goes_before_known_and_known_before_content() -> None:
    q = queue(groups=3)
    q.add_text(branch(0, 0))
    q.add_text(branch(0, 1))
    q.add_reward(member(0, 1), 1.0)
    complete(q, 2)
    q.groups[GroupId(0, 2)].advantages = {member(i, 2): a for i, a in enumerate((0.5, -0.5, 0.0))}
    classes = []
    while (pack := q.next_pack(anyone)) is not None:
        classes.append(pack.work_class)
        for b in pack.branches:
            q.groups[b.id.group_id].pending.discard(b.id)
    assert classes == [WorkClass.FINAL, WorkClass.KNOWN, WorkClass.CONTENT]


def test_final_packs_reach_across_groups_and_never_hold_a_coefficient_of_zero() -> None:
    q = queue(groups=2)
    for group, advantages in enumerate([(1.0, 0.0, -1.0), (0.0, 2.0, -2.0)]):
        complete(q, group)
        q.groups[GroupId(0, group)].advantages = {member(i, group): a for i, a in enumerate(advantages)}
    pack = q.next_pack(anyone)
    assert pack is not None
    assert {b.id: c for b, c in zip(pack.branches, pack.coefficients, strict=True)} == {
        member(0, 0): 1.0,
        member(2, 0): -1.0,
        member(1, 1): 2.0,
        member(2, 1): -2.0,
    }


def test_known_packs_hold_one_reward_of_one_group() -> None:
    q = queue(groups=2, size=5)
    for group in range(2):
        for index, reward in enumerate((1.0, 0.0, 1.0, 1.0)):
            q.add_text(branch(index, group))
            q.add_reward(member(index, group), reward)
    pack = q.next_pack(anyone)
    assert pack is not None
    assert pack.work_class is WorkClass.KNOWN
    assert len({b.id.group_id for b in pack.branches}) == 1
    assert sorted(b.id.member for b in pack.branches) == [0, 2, 3]
    assert pack.coefficients == (1.0, 1.0, 1.0)


def test_packs_are_sized_in_tokens_and_a_longer_branch_runs_alone() -> None:
    draw = random.Random(0)
    q = queue(pack_tokens=7, size=12)
    lengths = [draw.randint(1, 9) for _ in range(12)]
    for index, length in enumerate(lengths):
        q.add_text(branch(index, num_actions=length))
        q.add_reward(member(index), 1.0)
    seen: list[int] = []
    while (pack := q.next_pack(anyone)) is not None:
        assert pack.num_tokens <= 7 or len(pack.branches) == 1
        for b in pack.branches:
            q.groups[b.id.group_id].pending.discard(b.id)
            seen.append(b.id.member)
    assert sorted(seen) == list(range(12))
    assert max(lengths) > 7


def test_without_room_for_buffers_only_final_work_runs() -> None:
    q = queue()
    q.add_text(branch(0))
    q.add_reward(member(0), 1.0)
    q.add_text(branch(1))
    assert q.next_pack(no_one) is None
    assert not q.has_runnable(no_one)
    q.groups[GroupId(0, 0)].advantages = {member(0): 1.0}
    assert q.has_runnable(no_one)
    pack = q.next_pack(no_one)
    assert pack is not None
    assert pack.work_class is WorkClass.FINAL


def test_batch_wide_coefficients_are_known_only_when_the_step_is_complete() -> None:
    q = queue(coefficient=CoefficientClass.AFFINE_BATCH, groups=2)
    complete(q, 0)
    assert not q.knows_coefficients(q.groups[GroupId(0, 0)])
    complete(q, 1)
    assert not q.knows_coefficients(q.groups[GroupId(0, 0)])
    q.seal()
    assert q.knows_coefficients(q.groups[GroupId(0, 0)])


def test_a_lost_member_no_longer_keeps_its_group_open() -> None:
    q = queue()
    for index in range(3):
        q.add_text(branch(index))
    q.add_reward(member(0), 1.0)
    q.add_reward(member(2), 0.0)
    work = q.groups[GroupId(0, 0)]
    assert not work.is_complete
    q.lose(member(1))
    assert work.is_complete
    assert work.survivors == [member(0), member(2)]
    assert member(1) not in work.pending


def test_an_empty_trajectory_has_a_reward_and_no_work() -> None:
    q = queue()
    q.add_text(branch_tokens(trajectory([([1, 2, 3], [])])))
    q.add_reward(member(0), 1.0)
    assert q.next_pack(anyone) is None
    assert q.groups[GroupId(0, 0)].rewards == {member(0): 1.0}


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_everything_comes_once_and_was_announced() -> None:
    q = queue()
    q.add_text(branch(0))
    with pytest.raises(ContractError, match="twice"):
        q.add_text(branch(0))
    q.add_reward(member(0), 1.0)
    with pytest.raises(ContractError, match="once"):
        q.add_reward(member(0), 1.0)
    for stranger in (member(9), member(0, group=3)):
        with pytest.raises(ContractError, match="announced"):
            q.add_reward(stranger, 1.0)
        with pytest.raises(ContractError, match="announced"):
            q.lose(stranger)
    with pytest.raises(ContractError, match="announced"):
        q.add_text(branch(9))


def test_a_member_with_a_reward_is_not_lost_and_a_lost_one_gets_nothing_more() -> None:
    q = queue()
    q.add_text(branch(0))
    q.add_reward(member(0), 1.0)
    with pytest.raises(ContractError, match="without a reward"):
        q.lose(member(0))
    q.lose(member(1))
    with pytest.raises(ContractError, match="announced"):
        q.add_text(branch(1))
    with pytest.raises(ContractError, match="announced"):
        q.add_reward(member(1), 0.0)
    with pytest.raises(ContractError, match="announced"):
        q.lose(member(1))


def test_a_text_comes_before_its_reward() -> None:
    q = queue()
    with pytest.raises(ContractError, match="text before its reward"):
        q.with_text(member(0))
    q.add_text(branch(0))
    assert q.with_text(member(0)) is q.groups[GroupId(0, 0)]


def test_no_group_comes_after_the_seal() -> None:
    q = queue()
    q.seal()
    with pytest.raises(PhaseError, match="seal"):
        q.open_group(GroupId(0, 5), [member(0, 5)])


@pytest.mark.parametrize("first_is_empty", [False, True])
def test_members_of_a_group_share_their_prompt(first_is_empty: bool) -> None:
    """Also when the first text that came has no action tokens and so no prompt of its own to compare with."""
    q = queue(size=4)
    if first_is_empty:
        q.add_text(branch_tokens(trajectory([([8, 8, 8], [])], member=3)))
    q.add_text(branch(0, prompt=1))
    with pytest.raises(ContractError, match="share their prompt"):
        q.add_text(branch(1, prompt=7))
