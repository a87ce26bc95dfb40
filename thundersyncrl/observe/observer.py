"""What a run tells about itself while it goes: the observer protocol, and the metrics that a step reports.

Metrics of a `StepReport` that displays and plots know by name; others are recorded all the same:

| name | unit | meaning |
| --- | --- | --- |
| `reward_mean` | reward | mean over the trajectories that have a reward |
| `pass_rate` | 0 to 1 | share of them with reward 1 |
| `tokens_per_s` | 1/s | sampled tokens per second of the step |
| `num_action_tokens` | count | sampled tokens of the step |
| `action_tokens_mean`, `turns_mean` | count | per trajectory |
| `mismatch_max`, `mismatch_mean` | nats | learner log-prob against behavior log-prob, absolute |
| `gradient_norm` | | before clipping |
| `learning_rate` | | of this step's update |
| `step_s` | s | the whole step |
| `time_<phase>_s` | s | one phase of it, such as `time_rollout_s` |
| `idle_engine_s`, `idle_learner_s`, `idle_sandbox_s` | s | idle in the step; `idle_engine_tool_s` and such by cause |
| `overlap` | 0 to 1 | share of the gradient work during which the engine or a sandbox worked too |
| `bound_s`, `above_bound` | s, share | least time of the step, and how far above it the step took |
| `critical_path_s` | s | longest trajectory with its own gradient or verifier, optimizer and publish |
| `learner_tail_work_s` | s | gradient work after the last text was complete |
| `staleness_mean`, `staleness_max` | versions | how much older than the learner; asynchronous runs only |
| `capped_weights` | 0 to 1 | share of tokens whose importance weight was truncated; asynchronous runs only |
| `wasted_work_s` | s | gradient work on groups whose rewards turned out all equal |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from thundersyncrl.errors import ContractError
from thundersyncrl.records import StepReport, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Pass rates on held-out tasks, under one policy version.

    Raises:
        ContractError: a rate outside 0 to 1.
    """

    num: int
    """Trajectories with a verdict."""
    pass_rate: float
    """Share of them with reward 1."""
    by_kind: Mapping[str, float] = field(default_factory=dict[str, float])
    """Pass rate of each kind of task."""
    several_turns_pass_rate: float | None = None
    """Pass rate of the tasks that can't be solved without looking first; None when there are none."""
    num_failed: int = 0
    """Trajectories without a verdict, which no rate counts."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        rates = {"pass_rate": self.pass_rate, **self.by_kind}
        if self.several_turns_pass_rate is not None:
            rates["several_turns_pass_rate"] = self.several_turns_pass_rate
        for name, rate in rates.items():
            if not 0.0 <= rate <= 1.0:
                raise ContractError(f"expected rates between 0 and 1, got {name}={rate}; give shares, not counts")


class Observer(Protocol):
    """Is told what happens; never changes it. Called from one thread."""

    def phase(self, name: str, detail: str = "") -> None:
        """Hear that a part of the run begins, such as "warm start"; it lasts until the next one.

        Parts of a step are no phases here: a step reports their time among its metrics.
        """
        ...

    def progress(self, what: str, done: int, total: int) -> None:
        """Hear how far the phase has come, such as `("trajectories", 12, 64)`."""
        ...

    def step(self, report: StepReport) -> None:
        """Hear that a step has ended."""
        ...

    def sample(self, trajectory: Trajectory, reward: float | None) -> None:
        """Hear that a trajectory has ended; the reward is None without a verdict. Called for every one."""
        ...

    def evaluation(self, name: str, result: EvaluationResult) -> None:
        """Hear a result on held-out tasks; name is "before", "warm", "step N" or "after"."""
        ...

    def close(self) -> None:
        """Write out and let go. Idempotent."""
        ...
