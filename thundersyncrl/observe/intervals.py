"""Sets of time: unions, overlaps and lengths of intervals. Pure maths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Start and end in seconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time as sorted intervals that don't touch; empty ones vanish.

    Example:
        >>> union([(2.0, 3.0), (0.0, 1.0), (0.5, 2.0), (5.0, 5.0)])
        [(0.0, 3.0)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], start_s: float, end_s: float) -> list[Interval]:
    """Return the parts that lie between two times.

    Example:
        >>> clip([(0.0, 2.0), (3.0, 4.0)], 1.0, 3.0)
        [(1.0, 2.0)]
    """
    parts = ((max(start, start_s), min(end, end_s)) for start, end in intervals)
    return [(start, end) for start, end in parts if start < end]


def seconds(merged: Iterable[Interval]) -> float:
    """Return the length of intervals that don't overlap.

    Example:
        >>> seconds([(0.0, 1.0), (2.0, 2.5)])
        1.5
    """
    return sum(end - start for start, end in merged)


def overlap_seconds(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Return how long both are on, of two results of `union`.

    Example:
        >>> overlap_seconds([(0.0, 2.0), (3.0, 4.0)], [(1.0, 3.5)])
        1.5
    """
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
