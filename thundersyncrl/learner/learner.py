"""The learner: takes texts and rewards as they come, turns them into one gradient, and steps once.

Who waits for what:

| who           | waits for                                            | released by           |
| ------------- | ---------------------------------------------------- | --------------------- |
| a pack        | its items' admission under `stream`                  | text, reward, seal    |
| a group       | all its rewards, then all its gradients              | reward, lose, packs   |
| finish_step   | every announced trajectory: trained or lost          | the two above         |
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thundersyncrl.algorithms.coefficient_check import check_known
from thundersyncrl.algorithms.estimator import CoefficientClass, GroupRewards
from thundersyncrl.algorithms.own_reward import RunningMean
from thundersyncrl.errors import ContractError, NumericsError, PhaseError, StaleWorkError
from thundersyncrl.learner.auto import RECHECK_S, AutoLevel
from thundersyncrl.learner.branch import BranchTokens, branch_tokens, turn_tokens
from thundersyncrl.learner.costs import Kind
from thundersyncrl.learner.early import EarlyForwards, Live
from thundersyncrl.learner.late import coefficients_of, late_advantages, min_survivors, spread, step_scale
from thundersyncrl.learner.ledger import Ledger
from thundersyncrl.learner.objective import Objective, WorkLimits
from thundersyncrl.learner.optimizer import PolicyOptimizer
from thundersyncrl.learner.policy import Policy
from thundersyncrl.learner.prompt import Prompt
from thundersyncrl.learner.queue import GroupWork, Pack, WorkClass, WorkQueue
from thundersyncrl.learner.scoring import Scores
from thundersyncrl.learner.tally import Tally
from thundersyncrl.learner.weighting import refuse_stale, weighted
from thundersyncrl.records import GroupId, Trajectory, TrajectoryId, Turn


class Learner:
    """Gradient work of one policy. `turn`, `text`, `reward` and `lose` may come from any thread; the rest from one.

    Args:
        policy: under training.
        objective: what to maximise.
        limits: how work is cut.
        optimizer: steps once per `finish_step`.
    """

    def __init__(self, policy: Policy, objective: Objective, limits: WorkLimits, optimizer: PolicyOptimizer):
        self.policy = policy
        self.optimizer = optimizer
        self.version = 0
        self.running_mean = RunningMean()
        """Of past steps' rewards; the baseline of estimators that need one, fixed while a step runs."""
        self.last_pack: Pack | None = None
        """What the last `run_once` ran; None when it only read events or closed groups."""
        self.level = ""
        """At which level the last step's work was done, and with `stream = "auto"` why."""
        self._objective = objective
        self._limits = limits
        self._parameters: list[Tensor] = list(policy.trained.values())
        self._ledger = Ledger(self._parameters, objective.estimator.coefficient)
        self._queue = WorkQueue(
            stream=limits.stream, coefficient=objective.estimator.coefficient, pack_tokens=limits.pack_tokens
        )
        self._inbox: deque[Callable[[], None]] = deque()
        self._prompts: dict[GroupId, Prompt] = {}
        self._early = EarlyForwards()
        self._auto = AutoLevel(shares_cores=limits.shares_cores) if limits.stream == "auto" else None
        self._closed: dict[GroupId, GroupWork] = {}
        self._counters: list[int] | None = None
        self._tally = Tally()
        self._num_lost = 0
        self._is_sealed = False
        self._announced: set[GroupId] = set()

    # -- events ------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start the step of the current version."""
        self._ledger.begin(self.version)
        self._queue.clear()
        self._prompts, self._closed, self._tally, self._early = {}, {}, Tally(), EarlyForwards()
        if self._auto is not None:
            self._auto.begin_step()
        self._num_lost, self._is_sealed, self._announced = 0, False, set()
        self._counters = [p._version for p in self._parameters]

    def open_group(self, group: GroupId, members: Iterable[TrajectoryId]) -> None:
        """Announce a group; its members' texts and rewards will come."""
        if self._is_sealed:
            raise PhaseError(f"expected groups before the step is sealed, got {group} after it")
        if group in self._announced:
            raise ContractError(f"expected a new group, got {group}, which was opened before")
        self._announced.add(group)
        ids = tuple(members)
        self._inbox.append(lambda: self._open(group, ids))

    def _open(self, group: GroupId, members: tuple[TrajectoryId, ...]) -> None:
        self._ledger.open_group(group, members)
        self._queue.open_group(group, members)

    def seal(self) -> None:
        """Say that the step's groups are all announced."""
        self._is_sealed = True  # at once for groups that would come; the queue reads its own in order with the events
        self._inbox.append(self._queue.seal)

    def text(self, trajectory: Trajectory) -> None:
        """Hand over a trajectory whose text is complete.

        Raises:
            StaleWorkError: it was sampled under another version than the limits allow.
        """
        self._refuse_stale(trajectory.id, trajectory.turns)
        branch = branch_tokens(trajectory)
        self._inbox.append(lambda: self._end(branch))

    def turn(self, member: TrajectoryId, turns: Sequence[Turn], *, expected_turns: float | None = None) -> None:
        """Hand over the finished turns of a live trajectory; without effect below the levels "turn" and "auto".

        What isn't an extension of what was handed over before is a fresh start: the old graph is dropped.

        Args:
            member: announced, its text still to come.
            turns: all so far.
            expected_turns: how many it will have; those expected to end last run early first.

        Raises:
            StaleWorkError: as `text`.
        """
        self._refuse_stale(member, turns)
        if self._limits.stream in ("turn", "auto"):
            branch = turn_tokens(member, turns)
            self._inbox.append(lambda: self._offer(branch, len(turns), expected_turns))

    def _refuse_stale(self, member: TrajectoryId, turns: Sequence[Turn]) -> None:
        refuse_stale(member, turns, version=self.version, max_staleness=self._limits.max_staleness)

    def reward(self, member: TrajectoryId, reward: float) -> None:
        """Hand over a trajectory's reward; its text came before."""
        if reward != reward or reward in (float("inf"), float("-inf")):
            raise NumericsError(
                f"expected a finite reward, got {reward} ({member}); a verifier without verdict must fail"
            )
        self._inbox.append(lambda: self._land(member, reward))

    def lose(self, member: TrajectoryId) -> None:
        """Take out a trajectory that failed or was dropped; its group closes with the survivors."""
        self._inbox.append(lambda: self._lose(member))

    def _offer(self, branch: BranchTokens, num_turns: int, expected_turns: float | None) -> None:
        self._queue.refuse_ended(branch.id)
        self._early.offer(branch, num_turns, expected_turns)

    def _end(self, branch: BranchTokens) -> None:
        self._queue.add_text(branch)
        self._early.end(branch)

    def _land(self, member: TrajectoryId, reward: float) -> None:
        work = self._queue.with_text(member)
        if self._objective.shape_reward is not None:
            reward = self._objective.shape_reward(work.branches[member], reward)
        self._queue.add_reward(member, reward)
        if self._objective.estimator.coefficient is CoefficientClass.KNOWN:
            alone = GroupRewards(rewards_G=(reward,), lengths_G=(len(work.branches[member].target_ids),))
            work.advantages[member] = float(self._objective.estimator.advantages([alone], self.running_mean.mean)[0][0])
        if work.branches[member].target_ids and member not in work.pending:
            self._ledger.bind(member, reward, coefficient=work.advantages.get(member))

    def _lose(self, member: TrajectoryId) -> None:
        self._queue.lose(member)
        self._early.drop(member)
        self._ledger.discard(member)
        self._num_lost += 1

    def _absorb(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        for work in list(self._queue.groups.values()):
            if not work.advantages.keys() >= work.members and self._queue.knows_coefficients(work):
                self._set_advantages(self._batch_of(work))
        if self._auto is not None:
            self._auto.observe(self._queue.groups.values())

    def _batch_of(self, work: GroupWork) -> list[GroupWork]:
        is_batch = self._objective.estimator.coefficient is CoefficientClass.AFFINE_BATCH
        return list(self._queue.groups.values()) if is_batch else [work]

    def _set_advantages(self, groups: Sequence[GroupWork]) -> None:
        """Compute the coefficients of groups whose rewards are in; too few survivors get zeros and are dropped."""
        enough = [g for g in groups if len(g.survivors) >= min_survivors(self._objective)]
        for work, values in zip(enough, late_advantages(self._objective, enough, self.running_mean.mean), strict=True):
            work.advantages = dict(zip(work.survivors, values, strict=True))
        for work in groups:
            if work not in enough:
                work.advantages = dict.fromkeys(work.members, 0.0)

    # -- work --------------------------------------------------------------------------------------------------

    def _may_buffer(self, group: GroupId) -> bool:
        if not (self._auto is None or self._auto.admits(self._queue.groups[group])):
            return False
        return self._ledger.holds_buffers(group) or self._ledger.num_buffered_groups < self._limits.max_open_groups

    @property
    def recheck_s(self) -> float | None:
        """After how many seconds to ask for work again though nothing new has come; None for never."""
        return RECHECK_S if self._auto is not None and any(g.pending for g in self._queue.groups.values()) else None

    @property
    def has_work(self) -> bool:
        """True when `run_once` would do something."""
        if self._inbox or self._queue.has_runnable(self._may_buffer) or self._closable():
            return True
        return self._next_early() is not None

    @property
    def has_sure_work(self) -> bool:
        """True when there is work that can't turn out to have been for nothing."""
        runnable = self._queue.has_runnable(self._may_buffer, sure_only=True)
        return bool(self._inbox) or runnable or bool(self._closable())

    def run_once(self, *, sure_only: bool = False) -> None:
        """Read new events, run one pack, and close the groups that it completed."""
        started = time.perf_counter()
        self._absorb()
        self.last_pack = pack = self._queue.next_pack(self._may_buffer, sure_only=sure_only)
        if pack is not None:
            self._check_unchanged()
            self._run(pack)
        elif not sure_only and (live := self._next_early()) is not None:
            self._check_unchanged()
            self.last_pack = Pack(work_class=WorkClass.EARLY, branches=(live.branch,), coefficients=(1.0,))
            self._run_early(live)
        for work in self._closable():
            self._close(work)
        self._tally.busy_s += time.perf_counter() - started

    def _next_early(self) -> Live | None:
        may = self._auto is None or self._auto.wants_early(len(self._tally.early))
        return self._early.next(self._graph_room(), least=self._limits.early_tokens) if may else None

    def _graph_room(self) -> int:
        prompts = sum(len(p.token_ids) for p in self._prompts.values() if p.keeps_graph)
        return self._limits.graph_tokens - prompts - self._early.num_tokens

    def _run_early(self, live: Live) -> None:
        prompt, started = self._prompt(live.branch), time.perf_counter()
        num_tokens = self._early.run(live, self.policy, live.branch, prompt.prefix if prompt else None)
        self._tally.count_early(live.branch.id, num_tokens)
        self._learn_cost(Kind.EARLY, num_tokens, started)

    def _learn_cost(self, kind: Kind | None, num_tokens: int, started: float) -> None:
        if self._auto is not None and kind is not None:
            self._auto.costs.add(kind, num_tokens, time.perf_counter() - started)

    def _run(self, pack: Pack) -> None:
        prefixes, started = {b.id.group_id: self._prompt(b) for b in pack.branches}, time.perf_counter()
        kind = self._early.kind_of(pack)
        cut = {g: p.prefix if p else None for g, p in prefixes.items()}
        scores, num_tokens = self._early.score_pack(
            self.policy, pack.branches, cut, temperature=self._objective.temperature
        )
        parts = [c * self._weighted(s) for c, s in zip(pack.coefficients, scores, strict=True)]
        objective = torch.stack(parts).sum()
        leaves = {g: p.prefix.leaves if p else () for g, p in prefixes.items()}
        inputs = [*self._parameters, *(t for group in leaves.values() for t in group)]
        found = self._early.deferred.added_to(torch.autograd.grad(objective, inputs, allow_unused=True), inputs)
        gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=True)]
        self._file(pack, gradients, {g: len(t) for g, t in leaves.items()})
        self._tally.count(pack, num_tokens)
        self._learn_cost(kind, pack.num_tokens, started)

    def _weighted(self, scores: Scores) -> Tensor:
        limits, version = self._limits, self.version
        return weighted(scores, objective=self._objective, limits=limits, tally=self._tally, version=version)

    def _file(self, pack: Pack, gradients: Sequence[Tensor], num_leaves: Mapping[GroupId, int]) -> None:
        """Put a pack's gradient where its class belongs."""
        members = [b.id for b in pack.branches]
        # A gradient is of the version at which it was taken; without staleness the tokens are of that version too.
        version = self.version if self._limits.max_staleness else pack.branches[0].version
        if pack.work_class is WorkClass.FINAL:
            boundaries: dict[GroupId, Sequence[Tensor]] = {}
            start = len(self._parameters)
            for group, count in num_leaves.items():
                boundaries[group] = gradients[start : start + count]
                start += count
            self._ledger.add(members, gradients[: len(self._parameters)], boundaries, version=version)
        elif pack.work_class is WorkClass.KNOWN:
            reward = self._queue.groups[members[0].group_id].rewards[members[0]]
            self._ledger.fold(members, reward, gradients, version=version)
        else:
            self._ledger.hold(members[0], gradients, version=version)
        for member in members:
            self._queue.groups[member.group_id].pending.discard(member)

    def _prompt(self, branch: BranchTokens) -> Prompt | None:
        if not branch.prefix_ids:
            return None
        group = branch.id.group_id
        if group not in self._prompts:
            keep = len(branch.prefix_ids) <= self._graph_room()
            self._prompts[group] = Prompt(self.policy, branch.prefix_ids, keep_graph=keep)
            self._tally.num_tokens += len(branch.prefix_ids)
        self._queue.refuse_other_prompt(branch, self._prompts[group].token_ids)
        return self._prompts[group]

    def _closable(self) -> list[GroupWork]:
        return [g for g in self._queue.groups.values() if g.id not in self._closed and self._is_closable(g)]

    def _is_closable(self, work: GroupWork) -> bool:
        done = work.is_complete and work.advantages.keys() >= work.members
        return done and not any(work.advantages[m] for m in work.pending)

    def _close(self, work: GroupWork) -> None:
        for member in work.pending:  # what is left has coefficient 0
            self._early.drop(member)
        work.pending.clear()
        self._closed[work.id] = work
        if self._objective.estimator.coefficient is CoefficientClass.KNOWN:
            used = [work.advantages[m] for m in work.survivors]
            late = late_advantages(self._objective, [work], self.running_mean.mean)
            check_known(used, late[0], where=str(work.id))
        adjoints = self._ledger.close(work.id, coefficients_of(self._batch_of(work)))
        prompt = self._prompts.pop(work.id, None)
        if adjoints and prompt is not None:
            self._ledger.add_walked(prompt.walk(adjoints, self._parameters))

    def _check_unchanged(self) -> None:
        if self._counters is None:
            raise PhaseError("expected begin_step() before gradient work")
        if self._counters != [p._version for p in self._parameters]:
            raise StaleWorkError(
                f"expected the parameters of version {self.version} unchanged in its step, got a write to them; "
                "gradients taken before and after would not belong together"
            )

    # -- settle ------------------------------------------------------------------------------------------------

    def finish_step(self) -> dict[str, float]:
        """Settle the step, step the optimizer once, raise the version by one, and return the step's metrics.

        Raises:
            PhaseError: trajectories are neither trained nor lost, or work is left.
            StaleWorkError: a parameter changed while the step ran.
            NumericsError: the gradient isn't finite.
        """
        started = time.perf_counter()
        self._absorb()
        self._refuse_unfinished()
        self._check_unchanged()
        groups = list(self._queue.groups.values())
        if self._objective.estimator.coefficient is CoefficientClass.AFFINE_BATCH:
            self._ledger.close_batch(coefficients_of(groups))
        gradient = self._ledger.settle(step_scale(self._objective, groups))
        norm = self.optimizer.ascend(gradient)
        self.version += 1
        self._counters = None
        metrics = self._metrics(groups, norm)
        self.running_mean = self.running_mean.extended([r for g in groups for r in g.rewards.values()])
        self.level = self._tally.level + (f": {self._auto.reason()}" if self._auto is not None else "")
        metrics["optimizer_s"] = time.perf_counter() - started
        return metrics

    def _refuse_unfinished(self) -> None:
        if not self._queue.is_sealed:
            raise PhaseError("expected seal() before the step is finished: more groups could come")
        missing = [m for g in self._queue.groups.values() for m in sorted(g.members - g.rewards.keys())]
        if missing:
            raise PhaseError(f"expected every trajectory trained or lost, {len(missing)} are missing ({missing[0]})")
        if self.has_work:
            raise PhaseError("expected no work left before the step is finished; call run_once() while has_work")

    def _metrics(self, groups: Sequence[GroupWork], norm: float) -> dict[str, float]:
        survivors = {m for g in groups for m in g.survivors}
        dropped = sum(len(g.survivors) for g in groups if len(g.survivors) < min_survivors(self._objective))
        return {
            "gradient_norm": norm,
            "learning_rate": self.optimizer.learning_rate,
            "num_survivors": float(len(survivors) - dropped),
            "num_dropped": float(dropped),
            "num_lost": float(self._num_lost),
            **spread(groups),
            **self._tally.metrics(survivors),
            **(self._tally.staleness_metrics() if self._limits.max_staleness else {}),
        }
