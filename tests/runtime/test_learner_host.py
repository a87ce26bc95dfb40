"""What a learner's slice is logged as."""

from __future__ import annotations

from types import SimpleNamespace

from thundersyncrl.learner.branch import BranchTokens
from thundersyncrl.learner.queue import Pack, WorkClass
from thundersyncrl.records import TrajectoryId
from thundersyncrl.runtime.learner_host import slice_events


def branch(member: int, num_tokens: int) -> BranchTokens:
    return BranchTokens(
        id=TrajectoryId(3, 1, member),
        version=3,
        prefix_ids=(),
        input_ids=(1,) * num_tokens,
        scored=(0,),
        target_ids=(1,),
        behavior_logprobs=(-1.0,),
    )


def test_a_pack_is_logged_once_for_each_of_its_trajectories_with_the_same_times() -> None:
    pack = Pack(work_class=WorkClass.FINAL, branches=(branch(0, 5), branch(2, 7)), coefficients=(1.0, 1.0))
    events = slice_events(SimpleNamespace(last_pack=pack), 1.0, 1.5)
    assert [(e.trajectory, e.tokens, e.step) for e in events] == [
        ("step=3/group=1/member=0", 5, 3),
        ("step=3/group=1/member=2", 7, 3),
    ]
    assert {(e.actor, e.what, e.detail, e.start_s, e.end_s) for e in events} == {("learner", "pack", "final", 1.0, 1.5)}


def test_a_slice_that_ran_no_pack_is_work() -> None:
    (event,) = slice_events(SimpleNamespace(last_pack=None), 1.0, 1.5)
    assert (event.what, event.trajectory, event.seconds) == ("work", "", 0.5)
