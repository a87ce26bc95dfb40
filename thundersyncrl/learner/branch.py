"""One trajectory as the learner runs it: the tokens after its shared prompt, and which of them are scored.

The cut lies before the prompt's last token: that token's logits choose the first action token, so it runs in the
branch, and keys and values are all that has to cross the boundary. The last token is never run: nothing reads it.

Shapes: P shared prompt tokens without the last, T branch tokens, A action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thundersyncrl.errors import ContractError
from thundersyncrl.records import Trajectory, TrajectoryId, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTokens:
    """What the learner needs of one trajectory."""

    id: TrajectoryId
    version: int
    prefix_ids: tuple[int, ...]
    """[P] tokens run once for the whole group."""
    input_ids: tuple[int, ...]
    """[T] tokens run in the branch, at positions P .. P+T-1."""
    scored: tuple[int, ...]
    """[A] branch positions whose logits chose an action token."""
    target_ids: tuple[int, ...]
    """[A] the action tokens."""
    behavior_logprobs: tuple[float, ...]
    """[A] nats"""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


def branch_tokens(trajectory: Trajectory) -> BranchTokens:
    """Return the branch of a trajectory; without action tokens it has no branch tokens and costs nothing.

    Raises:
        ContractError: the trajectory has action tokens but no prompt token to condition the first one on.
    """
    return turn_tokens(trajectory.id, trajectory.turns)


def turn_tokens(id: TrajectoryId, turns: Sequence[Turn]) -> BranchTokens:
    """Return the branch of a trajectory's turns so far; that of more turns continues it.

    Raises:
        ContractError: as `branch_tokens`.
    """
    tokens = tuple(i for t in turns for ids in (t.observation_ids, t.action_ids) for i in ids)
    mask = [flag for t in turns for flag in (*[False] * len(t.observation_ids), *[True] * len(t.action_ids))]
    num_prompt = len(turns[0].observation_ids) if turns else 0
    actions = [index for index, sampled in enumerate(mask) if sampled]
    if actions and num_prompt == 0:
        raise ContractError(f"expected a prompt of at least one token, got none ({id})")
    start = max(num_prompt - 1, 0)
    end = actions[-1] if actions else start
    return BranchTokens(
        id=id,
        version=turns[0].version if turns else -1,
        prefix_ids=tokens[:start],
        input_ids=tokens[start:end],
        scored=tuple(index - 1 - start for index in actions),
        target_ids=tuple(tokens[index] for index in actions),
        behavior_logprobs=tuple(p for t in turns for p in t.behavior_logprobs),
    )
