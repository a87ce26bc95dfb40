"""Who computes now, and so how many threads each may use: the cores follow the work.

One byte per worker in memory that all map. A worker writes its own byte only, so nobody locks; what it reads may be a
slice old, which costs a slice of uneven sharing and nothing else.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

import torch

IDLE_S = 0.2
"""A worker gives its threads away once it has had nothing to do for this long. Tools answer sooner: a pack that took
all threads in every such gap would then run, for seconds, with more threads than there are cores."""


class Cores:
    """Shares `num_threads` among workers.

    Args:
        descriptor: of shared memory with one byte per worker; see `make_board`.
        worker: this worker's place.
        num_workers: of all.
        num_threads: of the machine.
        elastic: whether a worker that computes alone gets every thread; if not, each has its own share always.

    Example:
        >>> descriptor = make_board(2)
        >>> engine = Cores(descriptor, 0, num_workers=2, num_threads=4, elastic=True)
        >>> learner = Cores(descriptor, 1, num_workers=2, num_threads=4, elastic=True)
        >>> engine.begin(), learner.begin()
        (4, 2)
        >>> engine.end()
        >>> learner.begin()
        4
    """

    def __init__(self, descriptor: int, worker: int, *, num_workers: int, num_threads: int, elastic: bool):
        self._board = mmap.mmap(descriptor, num_workers)
        self._worker = worker
        self._num_workers = num_workers
        self._num_threads = num_threads
        self._elastic = elastic
        self._set = 0

    def begin(self) -> int:
        """Say that a slice begins, take this worker's threads, and return their number."""
        self._board[self._worker] = 1
        busy = sum(self._board[: self._num_workers]) if self._elastic else self._num_workers
        threads = max(1, self._num_threads // busy)
        if threads != self._set:
            torch.set_num_threads(threads)
            self._set = threads
        return threads

    def end(self) -> None:
        """Say that there is nothing to do."""
        self._board[self._worker] = 0


def halves(cores: Iterable[int], num_threads: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the cores of the rollouts (engine, controller, sandboxes) and those of the learner, for fixed halves.

    The learner gets as many as it has threads, so that no tool ever takes one from it. With a single core both have it.

    Example:
        >>> halves({0, 1, 2, 3, 4, 5}, 4)
        (frozenset({0, 1, 2, 3}), frozenset({4, 5}))
        >>> halves({3}, 2)
        (frozenset({3}), frozenset({3}))
    """
    ordered = sorted(cores)
    num_learner = min(max(1, num_threads // 2), len(ordered) - 1)
    if num_learner < 1:
        return frozenset(ordered), frozenset(ordered)
    return frozenset(ordered[:-num_learner]), frozenset(ordered[-num_learner:])


def make_board(num_workers: int) -> int:
    """Return the descriptor of memory in which nobody computes."""
    descriptor = os.memfd_create("thundersync-cores")
    os.ftruncate(descriptor, num_workers)
    return descriptor
