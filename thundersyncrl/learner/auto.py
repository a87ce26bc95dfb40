"""`stream = "auto"`: whether gradient work begins before its group is complete, by what that and waiting cost.

Complete groups always run first, at the lowest price. For work that could begin earlier:

| work                             | begins now when                                                                |
| -------------------------------- | ------------------------------------------------------------------------------ |
| a trajectory of an open group    | its group is expected to be complete later than the extra cost of not waiting  |
| the same, where cores are shared | ... and its group can't end uniform any more, or most don't                    |
| the finished turns of a live one | what is then left at its end costs less than all of it would                   |

Costs are measured as the run goes on (`costs.py`). How long a group still takes is the mean over past groups from the
moment when as many of its members were missing; where members end together that is short, and groups run whole.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from thundersyncrl.learner.costs import Costs, Kind, Mean
from thundersyncrl.learner.queue import GroupWork
from thundersyncrl.records import GroupId

SHARED_SECOND = 0.4
"""What a second of early work costs the engine where they share cores, in seconds: two threads make one process 1.4
times as fast as one thread does (docs/decisions/two-processes.md)."""
MOSTLY_UNIFORM = 0.4
"""Share of uniform groups from which early work on shared cores doesn't pay: what it costs the engine on every group
(SHARED_SECOND) is then more than two threads would need for it later (1 / 1.4) on the groups that count."""
NUM_TRIALS = 4
"""Trajectories of a step that begin early as long as it isn't known what that costs."""
RECHECK_S = 0.05
"""How often work that was put off is looked at again."""


@dataclass(slots=True)
class _Arrivals:
    """When a group came down to each number of missing members, in seconds of the clock."""

    since: dict[int, float] = field(default_factory=dict[int, float])
    is_complete: bool = False


class AutoLevel:
    """Decides for one learner; what it has learned outlives the steps.

    Args:
        shares_cores: whether early work takes time from the engine.
        clock: seconds.
    """

    def __init__(self, *, shares_cores: bool, clock: Callable[[], float] = time.monotonic):
        self.costs = Costs()
        self._shares_cores = shares_cores
        self._clock = clock
        self._left: defaultdict[int, Mean] = defaultdict(Mean)
        """Seconds from when so many members were missing to the group's completion."""
        self._uniform = Mean()
        self._arrivals: dict[GroupId, _Arrivals] = {}
        self._waits, self._extras = Mean(), Mean()
        """Of this step's decisions, for the reason."""

    def begin_step(self) -> None:
        """Forget the last step's groups."""
        self.costs.begin_step()
        self._arrivals = {}
        self._waits, self._extras = Mean(), Mean()

    def observe(self, groups: Iterable[GroupWork]) -> None:
        """Note what has come of each group."""
        now = self._clock()
        for work in groups:
            arrivals = self._arrivals.setdefault(work.id, _Arrivals())
            if arrivals.is_complete:
                continue
            if work.members and work.advantages.keys() >= work.members:
                arrivals.is_complete = True
                self._uniform.add(float(not any(work.advantages.values())))
                for missing, since in arrivals.since.items():
                    self._left[missing].add(now - since)
            else:
                arrivals.since.setdefault(len(work.members) - len(work.rewards), now)

    def expected_wait_s(self, work: GroupWork) -> float:
        """Return after how many seconds a group is expected to be complete; infinite where nothing is known."""
        missing = len(work.members) - len(work.rewards)
        mean = self._left[missing].value
        arrivals = self._arrivals.get(work.id)
        if mean is None or arrivals is None or missing not in arrivals.since:
            return math.inf
        passed = self._clock() - arrivals.since[missing]
        return max(mean - passed, passed)  # what is late already, among latencies with long tails, will be later still

    def admits(self, work: GroupWork) -> bool:
        """Return whether work of a group that isn't complete may begin now."""
        price, final = self.costs.of(Kind.OPEN), self.costs.of(Kind.FINAL)
        pending = [work.branches[m].num_tokens for m in work.pending]
        if self._shares_cores and not work.differs and (self._uniform.value or 0.0) > MOSTLY_UNIFORM:
            return False
        if price is None or final is None or not pending:
            return True
        extra, wait = (price - final) * sum(pending) / len(pending), self.expected_wait_s(work)
        self._extras.add(extra)
        if wait < math.inf:
            self._waits.add(wait)
        return wait > extra

    def wants_early(self, num_early: int) -> bool:
        """Return whether finished turns of a live trajectory may run now.

        Args:
            num_early: trajectories of this step that began early.
        """
        whole, late, early = (self.costs.of(k) for k in (Kind.OPEN, Kind.LATE, Kind.EARLY))
        if whole is None or late is None or early is None:
            return num_early < NUM_TRIALS
        return late + (SHARED_SECOND * early if self._shares_cores else 0.0) < whole

    def reason(self) -> str:
        """Return in one line what decided in this step."""
        parts = [f"{kind} {1e3 * price:.2f} ms/token" for kind in Kind if (price := self.costs.of(kind)) is not None]
        if (wait := self._waits.value) is not None and (extra := self._extras.value) is not None:
            parts.append(f"a group's completion {wait:.2f} s away, not waiting costs {extra:.2f} s a trajectory")
        if (uniform := self._uniform.value) is not None:
            parts.append(f"{uniform:.0%} of groups uniform")
        return "; ".join(parts) or "nothing is known yet"
