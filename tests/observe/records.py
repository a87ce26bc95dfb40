"""Builders of the records that observers are told."""

from __future__ import annotations

from collections.abc import Mapping

from thundersyncrl.records import Outcome, Status, StepReport, Task, Trajectory, TrajectoryId, Turn


def make_report(
    *, step: int = 0, failures: Mapping[str, int] | None = None, metrics: Mapping[str, float] | None = None
) -> StepReport:
    """A report of 8 trajectories."""
    failed = dict(failures or {})
    return StepReport(
        step=step,
        version=step,
        num_launched=8,
        num_trained=8 - sum(failed.values()),
        num_dropped=0,
        num_failed=sum(failed.values()),
        failures=failed,
        metrics=dict(metrics or {}),
    )


def make_trajectory(*, step: int = 0, member: int = 0, text: str = "ls", num_turns: int = 1) -> Trajectory:
    """A finished trajectory whose last message is the text."""
    turn = Turn(observation_ids=(1, 2), action_ids=(3,), behavior_logprobs=(-0.5,), version=step)
    return Trajectory(
        id=TrajectoryId(step, 0, member),
        task=Task(id="copy-1", instruction="Copy it.", kind="copy"),
        turns=(turn,) * num_turns,
        outcome=Outcome(status=Status.COMPLETED),
        messages=({"role": "user", "content": "Copy it."}, {"role": "assistant", "content": text}),
    )
