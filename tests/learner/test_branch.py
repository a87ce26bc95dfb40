from __future__ import annotations

import pytest

from tests.learner.builders import trajectory
from thundersyncrl.errors import ContractError
from thundersyncrl.learner.branch import branch_tokens


def test_the_cut_lies_before_the_last_prompt_token_and_the_last_token_is_never_run() -> None:
    branch = branch_tokens(trajectory([([1, 2, 3], [4, 5])]))
    assert branch.prefix_ids == (1, 2)
    assert branch.input_ids == (3, 4)
    assert branch.scored == (0, 1)
    assert branch.target_ids == (4, 5)


def test_only_sampled_tokens_are_scored() -> None:
    """Tool output (7, 8) and the prompt are read, never scored."""
    branch = branch_tokens(trajectory([([1, 2], [3, 4]), ([7, 8], [5]), ([9], [6])]))
    whole = (*branch.prefix_ids, *branch.input_ids)
    assert whole == (1, 2, 3, 4, 7, 8, 5, 9)
    assert branch.target_ids == (3, 4, 5, 6)
    for position, target in zip(branch.scored, branch.target_ids, strict=True):
        following = (*whole, 6)[len(branch.prefix_ids) + position + 1]
        assert following == target


def test_what_follows_the_last_action_is_not_run() -> None:
    cut = branch_tokens(trajectory([([1, 2], [3]), ([7, 8, 9], [])]))
    assert cut.input_ids == (2,)
    assert cut.target_ids == (3,)


def test_masks_come_from_turns_and_never_from_token_values() -> None:
    """Case H-12: eos and pad are both 2; the 2 inside the prompt is read, the 2 that ends an action is scored."""
    long = branch_tokens(trajectory([([9, 2, 9], [5, 6, 2])]))
    short = branch_tokens(trajectory([([9, 2, 9], [5, 2])]))
    assert (len(long.scored), len(short.scored)) == (3, 2)
    assert long.target_ids[-1] == short.target_ids[-1] == 2
    assert long.prefix_ids == (9, 2)


def test_a_prompt_of_one_token_leaves_nothing_to_share() -> None:
    branch = branch_tokens(trajectory([([1], [4, 5])]))
    assert branch.prefix_ids == ()
    assert branch.input_ids == (1, 4)


@pytest.mark.parametrize("turns", [[], [([1, 2, 3], [])]])
def test_without_action_tokens_there_is_nothing_to_run(turns: list[tuple[list[int], list[int]]]) -> None:
    branch = branch_tokens(trajectory(turns))
    assert branch.num_tokens == 0
    assert branch.target_ids == branch.scored == ()


def test_an_action_without_a_prompt_is_refused() -> None:
    with pytest.raises(ContractError, match="prompt"):
        branch_tokens(trajectory([([], [4])]))
