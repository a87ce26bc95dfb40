"""The transcripts file: every finished trajectory as one JSON object a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thundersyncrl.observe.observer import EvaluationResult
from thundersyncrl.records import StepReport, Trajectory
from thundersyncrl.runtime.json_lines import append_line


def transcript(trajectory: Trajectory, reward: float | None, *, with_tokens: bool = False) -> dict[str, Any]:
    """Return a trajectory as JSON can hold it: who, what came of it, the chat, and its tokens if asked for.

    Args:
        reward: None when it got no verdict.
        with_tokens: also the token ids and behavior log-probs of each turn, exactly as they were sampled.
    """
    row: dict[str, Any] = {
        "step": trajectory.id.step,
        "group": trajectory.id.group,
        "member": trajectory.id.member,
        "version": trajectory.version,
        "task": trajectory.task.id,
        "kind": trajectory.task.kind,
        "difficulty": trajectory.task.difficulty,
        "reward": reward,
        "status": str(trajectory.outcome.status),
        "cause": trajectory.outcome.cause,
        "reason": trajectory.outcome.reason,
        "num_turns": len(trajectory.turns),
        "num_action_tokens": trajectory.num_action_tokens,
        "metrics": dict(trajectory.metrics),
        "messages": [dict(message) for message in trajectory.messages],
    }
    if with_tokens:
        row["turns"] = [
            {
                "observation_ids": list(turn.observation_ids),
                "action_ids": list(turn.action_ids),
                "behavior_logprobs": list(turn.behavior_logprobs),
                "finish": str(turn.finish),
            }
            for turn in trajectory.turns
        ]
    return row


class TranscriptsFile:
    """Writes every finished trajectory to a file."""

    def __init__(self, path: Path, *, with_tokens: bool = False) -> None:
        self._path = path
        self._with_tokens = with_tokens

    def phase(self, name: str, detail: str = "") -> None:
        """Nothing is written."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Nothing is written."""

    def step(self, report: StepReport) -> None:
        """Steps are in the metrics file; nothing is written."""

    def sample(self, trajectory: Trajectory, reward: float | None) -> None:
        append_line(self._path, transcript(trajectory, reward, with_tokens=self._with_tokens))

    def evaluation(self, name: str, result: EvaluationResult) -> None:
        """Evaluations are in the metrics file; nothing is written."""

    def close(self) -> None:
        """Every line is on disk already."""
