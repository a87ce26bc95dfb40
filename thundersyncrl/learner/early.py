"""Early forwards: the finished turns of live trajectories run forward while their tools run, with their graph kept.

The loss of a late turn reaches every earlier one through attention, so one backward over the whole trajectory can't be
avoided; its forward can be over before it. Each run of new tokens attends to the cut prompt and to the keys and values
of its earlier runs, which stay in the graph. When the text is complete, the rest runs, and one backward goes through
all of it.

Shapes: T branch tokens, A action tokens, D width, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thundersyncrl.learner.attention import Branch, PackPlan, Prefix
from thundersyncrl.learner.branch import BranchTokens
from thundersyncrl.learner.costs import Kind
from thundersyncrl.learner.deferred import DeferredWeights
from thundersyncrl.learner.policy import Policy
from thundersyncrl.learner.queue import Pack, WorkClass
from thundersyncrl.learner.scoring import Scores, score_pack, token_logprobs
from thundersyncrl.records import GroupId, TrajectoryId


@dataclass(slots=True)
class Live:
    """A trajectory that still runs: what has come of it, and what of that has run forward."""

    branch: BranchTokens
    """Of all turns so far."""
    num_turns: int
    expected_turns: float
    """0 where nothing is known."""
    num_done: int = 0
    """Branch tokens that have run."""
    runs: list[Prefix] = field(default_factory=list[Prefix])
    """Keys and values of each run, in the graph."""
    hidden: list[Tensor] = field(default_factory=list[Tensor])
    """Last hidden states [A, D] of each run, where an action token was chosen."""

    def extends_to(self, branch: BranchTokens) -> bool:
        """Return whether what has run is the beginning of `branch`; it isn't after a fresh start of the trajectory."""
        done = self.num_done
        return branch.prefix_ids == self.branch.prefix_ids and branch.input_ids[:done] == self.branch.input_ids[:done]

    def run(self, policy: Policy, branch: BranchTokens, prefix: Prefix | None) -> int:
        """Run the tokens of `branch` that haven't run; return their number."""
        first, last = self.num_done, branch.num_tokens
        self.branch = branch
        if first == last:
            return 0
        device, offset = policy.device, len(branch.prefix_ids)
        plan = PackPlan([Branch(start=0, end=last - first, prefix=prefix, past=tuple(self.runs))], keep=True)
        ids = torch.tensor([branch.input_ids[first:]], device=device)
        hidden = policy.hidden(ids, torch.arange(offset + first, offset + last, device=device).unsqueeze(0), plan)[0]
        scored = torch.tensor([p - first for p in branch.scored if p >= first], dtype=torch.long, device=device)
        self.hidden.append(hidden[scored])
        self.runs.append(Prefix(keys_L=tuple(plan.keys_L), values_L=tuple(plan.values_L)))
        self.num_done = last
        return last - first

    def score(self, policy: Policy, temperature: float) -> Scores:
        """Return the log-probs of all action tokens, with graph."""
        targets = torch.tensor(self.branch.target_ids, device=policy.device)
        return Scores(branch=self.branch, logprobs=token_logprobs(policy, torch.cat(self.hidden), targets, temperature))


class EarlyForwards:
    """The live trajectories of a step and the graphs that wait for their end."""

    def __init__(self) -> None:
        self.deferred = DeferredWeights()
        """Where the backward of a trajectory that ran in pieces leaves its part of the weights' gradients."""
        self._live: dict[TrajectoryId, Live] = {}
        self._ended: dict[TrajectoryId, Live] = {}
        """Text complete, gradient not taken."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose graphs wait."""
        return sum(live.num_done for lives in (self._live, self._ended) for live in lives.values())

    def offer(self, branch: BranchTokens, num_turns: int, expected_turns: float | None) -> None:
        """Take what has come of a live trajectory; after a fresh start its old graph is dropped."""
        known = self._live.get(branch.id)
        if known is None or not known.extends_to(branch):
            self._live[branch.id] = Live(branch, num_turns, expected_turns or 0.0)
            return
        known.branch, known.num_turns = branch, num_turns
        known.expected_turns = expected_turns or known.expected_turns

    def end(self, branch: BranchTokens) -> None:
        """Say that a text is complete: what has run of it waits for its gradient."""
        live = self._live.pop(branch.id, None)
        if live is not None and live.num_done and live.extends_to(branch):
            self._ended[branch.id] = live

    def drop(self, member: TrajectoryId) -> None:
        """Forget a trajectory, and its graph if it has one."""
        self._live.pop(member, None)
        self._ended.pop(member, None)

    def kind_of(self, pack: Pack) -> Kind | None:
        """Return which price a pack's time tells of; None for a mixture."""
        num_begun = sum(branch.id in self._ended for branch in pack.branches)
        if num_begun:
            return Kind.LATE if num_begun == len(pack.branches) else None
        return Kind.FINAL if pack.work_class is WorkClass.FINAL else Kind.OPEN

    def run(self, live: Live, policy: Policy, branch: BranchTokens, prefix: Prefix | None) -> int:
        """Run the tokens of a live trajectory's `branch` that haven't run; return their number."""
        with self.deferred.collecting():
            return live.run(policy, branch, prefix)

    def score_pack(
        self,
        policy: Policy,
        branches: Sequence[BranchTokens],
        prefixes: Mapping[GroupId, Prefix | None],
        *,
        temperature: float,
    ) -> tuple[list[Scores], int]:
        """Return the scores of a pack's branches in order, and how many tokens ran forward for it.

        Those that began early go on from where they are, the others run side by side.
        """
        begun = {b.id: self._ended.pop(b.id) for b in branches if b.id in self._ended}
        fresh = [b for b in branches if b.id not in begun]
        scores = score_pack(policy, fresh, prefixes, temperature=temperature) if fresh else []
        by_id = {s.branch.id: s for s in scores}
        num_tokens = sum(b.num_tokens for b in fresh)
        for branch in (b for b in branches if b.id in begun):
            num_tokens += self.run(begun[branch.id], policy, branch, prefixes[branch.id.group_id])
            by_id[branch.id] = begun[branch.id].score(policy, temperature)
        return [by_id[b.id] for b in branches], num_tokens

    def next(self, room: int, *, least: int = 1) -> Live | None:
        """Return the trajectory whose new tokens should run now: of those that fit, the one expected to end last.

        Args:
            room: tokens whose graphs may still be kept.
            least: new tokens that are worth a run.
        """
        fitting = [live for live in self._live.values() if least <= live.branch.num_tokens - live.num_done <= room]
        # without a hint, the one that has come least far
        return max(fitting, key=lambda live: (live.expected_turns - live.num_turns, -live.num_turns), default=None)
