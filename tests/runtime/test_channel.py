"""Messages arrive in order, errors arrive as themselves, and a wait always ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from thundersyncrl.errors import ConfigError, WatchdogError, WorkerError
from thundersyncrl.runtime.channel import Channel, WorkerEnd


class Target:
    """What the worker's side serves."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.news: list[object] = []
        self.go = threading.Event()

    def note(self, value: int) -> None:
        self.told.append(value)

    def noted(self) -> list[int]:
        return list(self.told)

    def refuse(self) -> None:
        raise ConfigError("expected something else")

    def refuse_oddly(self) -> None:
        class Local(Exception):
            pass

        raise Local("cannot travel")

    def size(self, value: bytes) -> int:
        return len(value)

    def wait(self) -> None:
        self.go.wait(10)


def serve(connection: Connection, target: Target, ended: threading.Event) -> None:
    end = WorkerEnd(connection)
    try:
        while True:
            end.run(target, end.receive(), before_answer=lambda: end.tell(len(target.told)))
    except Exception:
        connection.close()
    ended.set()


def with_channel(body: Callable[[Channel, Target, list[Exception]], object]) -> None:
    """Run an async body against a served target."""

    async def run() -> None:
        ours, theirs = Pipe()
        target, lost, ended = Target(), list[Exception](), threading.Event()
        threading.Thread(target=serve, args=(theirs, target, ended), daemon=True).start()
        channel = Channel(
            ours,
            who="test",
            explain=lambda reason: WorkerError(f"gone: {reason}"),
            on_news=target.news.append,
            on_lost=lost.append,
        )
        try:
            await asyncio.wait_for(body(channel, target, lost), 30)  # type: ignore[arg-type]
        finally:
            target.go.set()
            channel.close()
            assert await asyncio.to_thread(ended.wait, 10), "the worker's side didn't see the end"

    asyncio.run(run())


def test_calls_arrive_in_order() -> None:
    async def body(channel: Channel, target: Target, lost: list[Exception]) -> None:
        for value in range(100):
            channel.tell("note", value)
        assert await channel.ask("noted", limit_s=10) == list(range(100))

    with_channel(body)


def test_news_arrives_before_the_answer_that_it_was_sent_with() -> None:
    async def body(channel: Channel, target: Target, lost: list[Exception]) -> None:
        channel.tell("note", 7)
        assert target.news == []
        await channel.ask("noted", limit_s=10)
        assert target.news == [1]

    with_channel(body)


def test_an_error_comes_back_as_itself() -> None:
    async def body(channel: Channel, target: Target, lost: list[Exception]) -> None:
        with pytest.raises(ConfigError, match="something else"):
            await channel.ask("refuse", limit_s=10)
        assert lost == []

    with_channel(body)


def test_an_error_that_cannot_travel_comes_as_its_text() -> None:
    async def body(channel: Channel, target: Target, lost: list[Exception]) -> None:
        with pytest.raises(WorkerError, match="Local: cannot travel"):
            await channel.ask("refuse_oddly", limit_s=10)

    with_channel(body)


def test_an_error_that_nobody_waits_for_is_the_reason_of_the_loss() -> None:
    async def body(channel: Channel, target: Target, lost: list[Exception]) -> None:
        channel.tell("refuse")
        with pytest.raises((ConfigError, WorkerError)):
            await channel.ask("wait", limit_s=10)
        assert [type(error) for error in lost] == [ConfigError]
        with pytest.raises(ConfigError):
            await channel.ask("noted", limit_s=10)

    with_channel(body)


def test_a_wait_ends_at_its_limit_with_its_name() -> None:
    async def body(channel: Channel, target: Target, lost: list[Exception]) -> None:
        with pytest.raises(WatchdogError, match=r"`wait` within 0\.05 s"):
            await channel.ask("wait", limit_s=0.05)
        target.go.set()
        assert await channel.ask("noted", limit_s=10) == []  # a late answer harms nobody

    with_channel(body)


def test_the_event_loop_does_not_wait_for_a_worker_that_reads_nothing() -> None:
    async def body(channel: Channel, target: Target, lost: list[Exception]) -> None:
        waiting = asyncio.ensure_future(channel.ask("wait", limit_s=10))
        await asyncio.sleep(0)
        sized = [asyncio.ensure_future(channel.ask("size", bytes(1 << 22), limit_s=10)) for _ in range(4)]
        await asyncio.sleep(0)  # reached although nobody reads: 16 MB don't fit into a socket
        target.go.set()
        assert await asyncio.gather(*sized) == [1 << 22] * 4
        await waiting

    with_channel(body)


def test_what_cannot_be_pickled_raises_at_its_sender() -> None:
    async def body(channel: Channel, target: Target, lost: list[Exception]) -> None:
        with pytest.raises(Exception, match="pickle"):
            channel.tell("note", lambda: None)
        assert await channel.ask("noted", limit_s=10) == []

    with_channel(body)


def test_after_close_a_call_is_refused() -> None:
    async def body(channel: Channel, target: Target, lost: list[Exception]) -> None:
        channel.close()
        channel.close()
        with pytest.raises(WorkerError, match="after `close`"):
            await channel.ask("noted", limit_s=10)
        assert lost == []

    with_channel(body)
