"""What a certificate found: cases with their errors, the tolerance of each, and one verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thundersyncrl.certify.cases import RewardKind
from thundersyncrl.certify.compare import WHOLE

FLOAT64_TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 2e-6
OFFSET_TOLERANCE = 1e-5
"""Float32 with rewards of 10,000 + U(0, 1)."""
CONTROL_FACTOR = 3.0
"""Float32 may also be this many times as far off as plain float32 training of the permuted batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One streamed gradient against its reference."""

    model: str
    train: str
    """"full" or "lora"."""
    dtype: str
    estimator: str
    rewards: RewardKind
    stream: str
    order: int
    errors: Mapping[str, float]
    """Relative error by parameter kind, and of the whole under "all"."""
    control: Mapping[str, float]
    """The same of a plain batch gradient in this dtype with the batch permuted; empty in float64."""
    reason: str = ""
    """Why there is no gradient, if there is none."""

    def tolerance(self, kind: str) -> float:
        """Return the largest error that passes; inf in bfloat16, which is reported and never claimed."""
        if self.dtype == "bfloat16":
            return math.inf
        if self.dtype == "float64":
            return FLOAT64_TOLERANCE
        floor = OFFSET_TOLERANCE if self.rewards is RewardKind.OFFSET else FLOAT32_TOLERANCE
        return max(floor, CONTROL_FACTOR * self.control.get(kind, 0.0))

    @property
    def passes(self) -> bool:
        """True when the whole gradient and that of every parameter kind are within tolerance."""
        return not self.reason and all(error <= self.tolerance(kind) for kind, error in self.errors.items())

    @property
    def label(self) -> str:
        """Estimators of a table: offset rewards have rows of their own."""
        return f"{self.estimator} +10,000" if self.rewards is RewardKind.OFFSET else self.estimator


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyReport:
    """All cases of one certificate."""

    cases: Sequence[Case]
    num_packs: Mapping[str, int]
    """Packs that ran, by work class."""
    seconds: float
    sabotage: str = ""

    @property
    def failed(self) -> list[Case]:
        return [case for case in self.cases if not case.passes]

    @property
    def verdict(self) -> str:
        """ "pass" when there are judged cases and all of them pass, else "fail"."""
        judged = any(case.dtype != "bfloat16" for case in self.cases)
        return "pass" if judged and not self.failed else "fail"

    @property
    def worst(self) -> dict[str, float]:
        """Largest error of the whole gradient by dtype; offset rewards have their own figure."""
        plain = [case for case in self.cases if case.rewards is not RewardKind.OFFSET]
        return _largest(plain, lambda case: case.dtype, lambda case: case.errors[WHOLE])

    @property
    def worst_offset(self) -> float:
        """Largest error in float32 with rewards of 10,000 + U(0, 1); 0.0 when none were run."""
        return max((c.errors[WHOLE] for c in self.cases if c.rewards is RewardKind.OFFSET), default=0.0)

    @property
    def control(self) -> float:
        """Largest error of the permuted plain batch: in float32, or in bfloat16 where only that was run."""
        by_dtype = _largest(self.cases, lambda case: case.dtype, lambda case: case.control.get(WHOLE, 0.0))
        return by_dtype.get("float32", by_dtype.get("bfloat16", 0.0))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per estimator and per parameter kind, of each dtype and kind of training."""
        return [
            *self._rows("estimator", lambda case: [(case.label, WHOLE)]),
            *self._rows("parameters", lambda case: [(k, k) for k in case.errors if k != WHOLE], with_offset=False),
        ]

    def _rows(
        self, by: str, names: Callable[[Case], Iterable[tuple[str, str]]], *, with_offset: bool = True
    ) -> list[dict[str, Any]]:
        found: dict[tuple[str, str, str], list[tuple[Case, str]]] = {}
        for case in self.cases:
            if with_offset or case.rewards is not RewardKind.OFFSET:
                for name, kind in names(case):
                    found.setdefault((name, case.dtype, case.train), []).append((case, kind))
        return [_row(by, *key, entries) for key, entries in found.items()]

    def to_json(self) -> dict[str, Any]:
        """Return the report as one JSON object; an error that isn't finite is null."""
        return {
            "verdict": self.verdict,
            "worst": {dtype: _finite(error) for dtype, error in self.worst.items()},
            "worst_offset": _finite(self.worst_offset),
            "control": _finite(self.control),
            "cases": len(self.cases),
            "failed": len(self.failed),
            "tolerances": {
                "float64": FLOAT64_TOLERANCE,
                "float32": FLOAT32_TOLERANCE,
                "float32_offset": OFFSET_TOLERANCE,
                "float32_times_control": CONTROL_FACTOR,
            },
            "packs": dict(self.num_packs),
            "seconds": round(self.seconds, 1),
            "sabotage": self.sabotage,
            "failures": [_failure(case) for case in self.failed[:10]],
            "rows": self.rows(),
        }

    def table(self) -> str:
        """Return the report as text: worst errors, then why it failed if it did, then the verdict."""
        rows = self.rows()
        lines = [
            *_pivot("estimator", [row for row in rows if row["by"] == "estimator"]),
            "",
            *_pivot("parameters", [row for row in rows if row["by"] == "parameters"]),
            "",
            *(f"failed: {_failure(case)}" for case in self.failed[:3]),
            f"packs: {', '.join(f'{kind} {count}' for kind, count in self.num_packs.items())}",
            f"permuted plain batch (control): {self.control:.1e}",
            *(f"worst {dtype}: {error:.1e}{_bound(dtype)}" for dtype, error in self.worst.items()),
        ]
        if any(case.rewards is RewardKind.OFFSET for case in self.cases):
            lines.append(f"worst float32 with rewards near 10,000: {self.worst_offset:.1e} (<= {OFFSET_TOLERANCE:.0e})")
        verdict = f"{self.verdict} (sabotage: {self.sabotage})" if self.sabotage else self.verdict
        lines.append(f"{verdict}: {len(self.cases)} cases, {len(self.failed)} failed, {self.seconds:.0f} s")
        return "\n".join(lines)


def _largest(cases: Iterable[Case], key: Callable[[Case], str], value: Callable[[Case], float]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for case in cases:
        largest[key(case)] = max(largest.get(key(case), 0.0), value(case))
    return largest


def _row(by: str, name: str, dtype: str, train: str, entries: Sequence[tuple[Case, str]]) -> dict[str, Any]:
    case, kind = max(entries, key=lambda entry: entry[0].errors[entry[1]] / entry[0].tolerance(entry[1]))
    tolerance = case.tolerance(kind)
    return {
        "by": by,
        "name": name,
        "dtype": dtype,
        "train": train,
        "cases": len(entries),
        "error": _finite(max(c.errors[k] for c, k in entries)),
        "control": _finite(max(c.control.get(k, 0.0) for c, k in entries)),
        # of the case that comes closest to its own; null where nothing is claimed
        "tolerance": _finite(tolerance),
        "ok": all(not c.reason and c.errors[k] <= c.tolerance(k) for c, k in entries),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _failure(case: Case) -> str:
    where = f"{case.model} {case.train} {case.dtype} {case.label} stream={case.stream} order={case.order}"
    if case.reason:
        return f"{where}: {case.reason}"
    kind = max(case.errors, key=lambda k: case.errors[k] / case.tolerance(k))
    return f"{where}: relative error {case.errors[kind]:.1e} > {case.tolerance(kind):.1e} ({kind} parameters)"


def _bound(dtype: str) -> str:
    return {
        "float64": f" (<= {FLOAT64_TOLERANCE:.0e})",
        "float32": f" (<= {FLOAT32_TOLERANCE:.0e}, or {CONTROL_FACTOR:.0f}x the control if larger)",
    }.get(dtype, " (reported only)")


def _pivot(title: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys((row["dtype"], row["train"]) for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    cells = {(row["name"], row["dtype"], row["train"]): row for row in rows}
    width = max([len(name) for name in names] + [len(title)])
    lines = [f"{title:{width}}" + "".join(f" {' '.join(column):>15}" for column in columns)]
    for name in names:
        lines.append(f"{name:{width}}" + "".join(f" {_cell(cells.get((name, *c))):>15}" for c in columns))
    return lines


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    error = "inf" if row["error"] is None else f"{row['error']:.1e}"
    return error if row["ok"] else f"{error} FAIL"
