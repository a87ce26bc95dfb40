"""Memory for keys and values: rows of fixed capacity, side by side in slabs that are attended in one product.

A row is a contiguous run of tokens for one sequence (or one shared prompt), so appending copies nothing and reading
needs no gather. Rows of one capacity share a slab; a slab costs what it allocates, and the sum never passes the limit.

Shapes: L layers, R rows of a slab, N key/value heads, C capacity in tokens, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMALLEST_ROW = 32
"""Capacity of the smallest row, in tokens."""
SLAB_TOKENS = 4096
"""Tokens of a slab, at most, where one row fits."""
SLAB_ROWS = 16
"""Rows of a slab, at most: the padding of a slab is bounded by its longest row, and an idle slab is skipped whole."""


class CacheFull(Exception):
    """No row of the wanted size is free now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What one token's keys and values look like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Slab:
    """Rows of one capacity; keys and values of every layer."""

    def __init__(self, shape: CacheShape, *, num_rows: int, capacity: int):
        self.num_rows = num_rows
        self.capacity = capacity
        size = (num_rows, shape.num_kv_heads, capacity, shape.head_dim)
        # zeros: columns past a row's end enter products with weight 0, and 0 times a stray NaN is NaN
        self.keys_L = [torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(shape.num_layers)]
        self.values_L = [torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(shape.num_layers)]
        self.free = list(range(num_rows - 1, -1, -1))

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.capacity

    @property
    def is_empty(self) -> bool:
        return len(self.free) == self.num_rows


@dataclass(slots=True, eq=False)
class Row:
    """A sequence's place in a slab."""

    slab: Slab
    index: int
    length: int = 0
    """Tokens whose keys and values are written."""


def capacity_for(num_tokens: int) -> int:
    """Return the smallest capacity of a row for so many tokens: 32 or 48 times a power of two.

    Example:
        >>> [capacity_for(n) for n in (1, 33, 49, 100, 129)]
        [32, 48, 64, 128, 192]
    """
    capacity = SMALLEST_ROW
    while capacity < num_tokens:
        if capacity * 3 // 2 >= num_tokens:
            return capacity * 3 // 2
        capacity *= 2
    return capacity


class KvCache:
    """Rows in slabs, never more than `cache_tokens` in all.

    Args:
        shape: of one token.
        cache_tokens: limit on the tokens that slabs may have room for, used or not.
    """

    def __init__(self, shape: CacheShape, *, cache_tokens: int):
        self._shape = shape
        self._limit = cache_tokens
        self._slabs: list[Slab] = []
        self.peak_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the present slabs have room for."""
        return sum(slab.num_tokens for slab in self._slabs)

    def can_ever_hold(self, *rows: int) -> bool:
        """True when rows for so many tokens each fit together into an empty cache."""
        return sum(self._num_rows(n) * self._capacity(n) for n in rows) <= self._limit

    def allocate(self, num_tokens: int) -> Row:
        """Return an empty row with room for so many tokens.

        Raises:
            CacheFull: none is free, and the limit leaves no room for another slab.
        """
        capacity = self._capacity(num_tokens)
        fitting = [s for s in self._slabs if s.free and s.capacity >= capacity]
        same = [s for s in fitting if s.capacity == capacity]
        if same:
            return Row(same[0], same[0].free.pop())
        slab = self._add_slab(num_tokens)
        if slab is None and fitting:
            slab = min(fitting, key=lambda s: s.capacity)
        if slab is None:
            raise CacheFull
        return Row(slab, slab.free.pop())

    def move(self, row: Row, target: Row) -> None:
        """Copy a row's tokens to another row and free the first."""
        pairs = ((row.slab.keys_L, target.slab.keys_L), (row.slab.values_L, target.slab.values_L))
        for states_L, copies_L in pairs:
            for states, copies in zip(states_L, copies_L, strict=True):
                copies[target.index, :, : row.length] = states[row.index, :, : row.length]
        target.length = row.length
        self.free(row)

    def free(self, row: Row) -> None:
        """Give a row back; its slab stays for the next one."""
        row.slab.free.append(row.index)
        row.length = 0

    def free_slabs(self) -> None:
        """Give the memory of slabs without rows in use back."""
        self._slabs = [slab for slab in self._slabs if not slab.is_empty]

    def _capacity(self, num_tokens: int) -> int:
        capacity = capacity_for(num_tokens)
        return self._limit if num_tokens <= self._limit < capacity else capacity

    def _num_rows(self, num_tokens: int) -> int:
        # an eighth of the limit: a small cache must not go to one size of rows
        tokens = min(SLAB_TOKENS, self._limit // 8)
        return max(1, min(SLAB_ROWS, tokens // self._capacity(num_tokens)))

    def _add_slab(self, num_tokens: int) -> Slab | None:
        capacity, wanted = self._capacity(num_tokens), self._num_rows(num_tokens)
        for slab in [s for s in self._slabs if s.is_empty]:
            if self._limit - self.num_tokens >= wanted * capacity:
                break
            self._slabs.remove(slab)
        num_rows = min(wanted, (self._limit - self.num_tokens) // capacity)
        if num_rows < 1:
            return None
        slab = Slab(self._shape, num_rows=num_rows, capacity=capacity)
        self._slabs.append(slab)
        self.peak_tokens = max(self.peak_tokens, self.num_tokens)
        return slab
