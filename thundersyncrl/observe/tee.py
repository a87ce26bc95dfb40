"""One observer that passes everything on to several."""

from __future__ import annotations

from thundersyncrl.observe.observer import EvaluationResult, Observer
from thundersyncrl.records import StepReport, Trajectory


class Tee:
    """Tells each of its observers, in order. Without any, it is the observer that does nothing.

    Example:
        >>> Tee().phase("rollout")
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def phase(self, name: str, detail: str = "") -> None:
        for observer in self._observers:
            observer.phase(name, detail)

    def progress(self, what: str, done: int, total: int) -> None:
        for observer in self._observers:
            observer.progress(what, done, total)

    def step(self, report: StepReport) -> None:
        for observer in self._observers:
            observer.step(report)

    def sample(self, trajectory: Trajectory, reward: float | None) -> None:
        for observer in self._observers:
            observer.sample(trajectory, reward)

    def evaluation(self, name: str, result: EvaluationResult) -> None:
        for observer in self._observers:
            observer.evaluation(name, result)

    def close(self) -> None:
        """Close every observer, also when an earlier one raises."""
        errors: list[Exception] = []
        for observer in self._observers:
            try:
                observer.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
