"""Laws of keeping: what is reused is what the prompt confirms, and idle sessions give way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch

from thundersyncrl.rollout.engine import SampleRequest
from thundersyncrl.rollout.kv_cache import CacheFull, CacheShape, KvCache
from thundersyncrl.rollout.session_cache import Session, SessionCache

SHAPE = CacheShape(num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu"))
IDS: Iterator[int] = count()


def cache_of(tokens: int) -> SessionCache:
    return SessionCache(KvCache(SHAPE, cache_tokens=tokens))


def request_of(session: str, prompt_ids: tuple[int, ...], *, budget: int = 4, group: str = "") -> SampleRequest:
    return SampleRequest(
        id=str(next(IDS)),
        session=session,
        prompt_ids=prompt_ids,
        max_new_tokens=budget,
        temperature=1.0,
        seed=0,
        shared_prefix=group,
    )


def play(cache: SessionCache, request: SampleRequest, sampled: tuple[int, ...] = ()) -> Session:
    """Open, pretend to compute the prompt and all but the last sampled token, and close."""
    session = cache.open(request)
    if session.prompt and not session.prompt.is_ready:
        session.prompt.row.length = len(session.prompt.token_ids)
        session.prompt.last_hidden = torch.zeros(2)
    new = [*request.prompt_ids[len(session.token_ids) :], *sampled[:-1]]
    session.token_ids.extend(new)
    session.row.length += len(new)
    cache.close(session)
    return session


def test_the_next_turn_keeps_what_the_last_one_computed() -> None:
    cache = cache_of(1024)
    play(cache, request_of("s", (1, 2, 3)), (4, 5))
    session = cache.open(request_of("s", (1, 2, 3, 4, 5, 6, 7)))
    assert session.token_ids == [1, 2, 3, 4]
    assert session.row.length == 4
    assert (cache.num_tokens_reused, cache.num_mismatched) == (4, 0)


def test_a_prompt_that_differs_is_computed_from_there_on_and_counted() -> None:
    cache = cache_of(1024)
    play(cache, request_of("s", (1, 2, 3, 4, 5, 6)))
    session = cache.open(request_of("s", (1, 2, 9, 4, 5, 6, 7)))
    assert (session.token_ids, session.row.length) == ([1, 2], 2)
    assert (cache.num_tokens_reused, cache.num_mismatched) == (2, 1)


def test_a_repeated_prompt_computes_its_last_token_again() -> None:
    cache = cache_of(1024)
    play(cache, request_of("s", (1, 2, 3)), (4, 5))
    session = cache.open(request_of("s", (1, 2, 3)))
    assert (session.token_ids, cache.num_mismatched) == ([1, 2], 0)


def test_a_longer_turn_moves_to_a_larger_row_with_what_it_holds() -> None:
    cache = cache_of(4096)
    first = play(cache, request_of("s", tuple(range(20))))
    assert first.row.slab.capacity == 32
    first.row.slab.keys_L[0][first.row.index, :, :20] = 7.0
    session = cache.open(request_of("s", tuple(range(100))))
    assert session.row.slab.capacity >= 103
    assert session.row.length == 20
    assert set(session.row.slab.keys_L[0][session.row.index, :, :20].flatten().tolist()) == {7.0}


def test_members_of_a_group_share_the_prompt_and_own_the_rest() -> None:
    cache = cache_of(4096)
    members = [cache.open(request_of(f"m{i}", (1, 2, 3), group="g")) for i in range(3)]
    assert len({id(m.prompt) for m in members}) == 1
    assert len({(id(m.row.slab), m.row.index) for m in members}) == 3
    assert all(m.token_ids == [1, 2, 3] and m.row.length == 0 for m in members)
    assert cache.num_tokens_shared == 6


def test_who_does_not_begin_with_the_groups_prompt_shares_nothing() -> None:
    cache = cache_of(4096)
    cache.open(request_of("a", (1, 2, 3), group="g"))
    assert cache.open(request_of("b", (1, 9, 3), group="g")).prompt is None


def test_idle_sessions_give_way_longest_idle_first() -> None:
    cache = cache_of(96)
    for name in ("old", "young", "live"):
        play(cache, request_of(name, tuple(range(25))))
    cache.open(request_of("live", tuple(range(25))))
    cache.open(request_of("new", tuple(range(25))))
    assert cache.num_evicted == 1
    # "young" still holds its tokens, "old" begins anew
    assert cache.open(request_of("young", tuple(range(27)))).token_ids == list(range(25))


def test_live_sessions_never_give_way() -> None:
    cache = cache_of(64)
    sessions = [cache.open(request_of(name, tuple(range(25)))) for name in ("a", "b")]
    with pytest.raises(CacheFull):
        cache.open(request_of("c", tuple(range(25))))
    cache.close(sessions[0])
    assert cache.open(request_of("c", tuple(range(25)))).token_ids == []


def test_a_prompt_is_kept_while_a_session_reads_it() -> None:
    cache = cache_of(128)
    member = play(cache, request_of("m", tuple(range(20)), group="g"), (5, 6))
    cache.open(request_of("m", (*range(20), 5, 6)))
    with pytest.raises(CacheFull):
        cache.open(request_of("x", tuple(range(90))))
    assert member.prompt is not None
    assert member.prompt.row.length == 20


def test_a_request_as_large_as_the_cache_always_gets_it_once_nothing_is_live() -> None:
    cache = cache_of(256)
    for i in range(6):
        play(cache, request_of(f"s{i}", tuple(range(20 + i)), group=f"g{i}"))
    largest = request_of("big", tuple(range(250)), budget=7, group="g9")
    assert cache.can_ever_hold(largest)
    assert cache.open(largest).row.slab.capacity == 256


def test_releasing_a_live_session_waits_for_its_request() -> None:
    cache = cache_of(1024)
    session = cache.open(request_of("s", (1, 2, 3)))
    cache.forget("s")
    session.token_ids.extend((1, 2, 3))
    session.row.length = 3
    cache.close(session)
    assert cache.open(request_of("s", (1, 2, 3, 4))).token_ids == []
    assert cache.num_tokens_reused == 0


def test_clear_forgets_everything() -> None:
    cache = cache_of(1024)
    play(cache, request_of("s", (1, 2, 3), group="g"), (4, 5))
    cache.clear()
    session = cache.open(request_of("s", (1, 2, 3, 4, 5), group="g"))
    assert cache.num_tokens_reused == 0
    assert session.prompt is not None
    assert not session.prompt.is_ready


def test_a_session_that_cannot_grow_beside_its_old_row_begins_anew() -> None:
    cache = cache_of(256)
    play(cache, request_of("s", tuple(range(100))))
    session = cache.open(request_of("s", tuple(range(180))))
    assert (session.token_ids, session.row.slab.capacity) == ([], 192)
    assert cache.num_evicted == 1
