"""Laws of the cache's memory: never above its limit, rows never overlap, and what is free can be had."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersyncrl.rollout.kv_cache import SLAB_ROWS, CacheFull, CacheShape, KvCache, Row, capacity_for

SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


def cache_of(tokens: int) -> KvCache:
    return KvCache(SHAPE, cache_tokens=tokens)


def fill(row: Row, value: float, length: int) -> None:
    for states in (*row.slab.keys_L, *row.slab.values_L):
        states[row.index, :, :length] = value
    row.length = length


def values_of(row: Row) -> set[float]:
    states = (*row.slab.keys_L, *row.slab.values_L)
    return {float(x) for s in states for x in s[row.index, :, : row.length].flatten()}


@given(st.integers(1, 100_000))
def test_a_capacity_wastes_at_most_half_of_what_was_asked(num_tokens: int) -> None:
    assert num_tokens <= capacity_for(num_tokens) < max(33, 1.5 * num_tokens)


def test_a_row_has_room_for_what_was_asked() -> None:
    cache = cache_of(4096)
    for num_tokens in (1, 31, 32, 33, 100, 700):
        assert cache.allocate(num_tokens).slab.capacity >= num_tokens


def test_rows_of_one_size_share_a_slab() -> None:
    rows = [cache.allocate(50) for cache in [cache_of(65536)] for _ in range(SLAB_ROWS + 1)]
    assert len({id(row.slab) for row in rows}) == 2
    assert len({(id(row.slab), row.index) for row in rows}) == SLAB_ROWS + 1


def test_a_full_cache_says_so_and_a_freed_row_can_be_had_again() -> None:
    cache = cache_of(256)
    rows = [cache.allocate(32) for _ in range(8)]
    with pytest.raises(CacheFull):
        cache.allocate(1)
    cache.free(rows[3])
    assert cache.allocate(20).index == rows[3].index
    assert cache.num_tokens == cache.peak_tokens == 256


def test_memory_of_another_size_is_reused_once_it_is_empty() -> None:
    cache = cache_of(256)
    rows = [cache.allocate(32) for _ in range(8)]
    for row in rows:
        cache.free(row)
    assert cache.allocate(256).slab.capacity == 256
    assert cache.peak_tokens == 256


def test_a_small_sequence_takes_a_larger_row_when_nothing_else_is_left() -> None:
    cache = cache_of(256)
    cache.free(cache.allocate(128))
    others = [cache.allocate(128), cache.allocate(64), cache.allocate(64)]
    cache.free(others[0])
    assert cache.allocate(40).slab.capacity in (48, 128)


def test_the_last_row_may_end_at_the_limit() -> None:
    cache = cache_of(1000)
    assert cache.can_ever_hold(1000)
    assert cache.allocate(1000).slab.capacity == 1000
    assert not cache.can_ever_hold(1001)


def test_moving_a_row_keeps_what_it_holds_and_frees_the_old_one() -> None:
    cache = cache_of(4096)
    row = cache.allocate(40)
    fill(row, 3.0, 40)
    old = (row.slab, row.index)
    target = cache.allocate(90)
    cache.move(row, target)
    assert (target.length, values_of(target)) == (40, {3.0})
    assert old[1] in old[0].free


def test_what_nobody_wrote_is_zero() -> None:
    """Columns past a row's end enter products with weight 0, and 0 times NaN is NaN."""
    row = cache_of(64).allocate(64)
    assert all(int(states.count_nonzero()) == 0 for states in (*row.slab.keys_L, *row.slab.values_L))


@settings(deadline=None, max_examples=60)
@given(st.integers(64, 3000), st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=60))
def test_rows_keep_their_contents_and_the_limit_holds(limit: int, steps: list[tuple[bool, int]]) -> None:
    cache, live = cache_of(limit), list[tuple[Row, float]]()
    for number, (allocates, size) in enumerate(steps, start=1):
        if allocates:
            try:
                row = cache.allocate(size)
            except CacheFull:
                assert live or not cache.can_ever_hold(size)
                continue
            fill(row, float(number), size)
            live.append((row, float(number)))
        elif live:
            cache.free(live.pop(size % len(live))[0])
        assert cache.num_tokens <= cache.peak_tokens <= limit
        assert all(values_of(row) == {value} for row, value in live)
