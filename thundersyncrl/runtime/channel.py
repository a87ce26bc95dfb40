"""Messages between the controller and a worker process, over one socket pair.

| who                | waits for                  | released by                                      |
| ------------------ | -------------------------- | ------------------------------------------------ |
| `ask`              | the worker's answer        | the worker, its death, or the limit              |
| the reader thread  | the next message           | the worker, or the end of its socket             |
| the writer thread  | something to send          | `tell`, `ask`, `close`                           |

Only our own processes hold the two ends, so messages are pickles. The writer is a thread of its own: a worker in the
middle of a long slice reads nothing, and the event loop must not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from thundersyncrl.errors import WatchdogError, WorkerError


@dataclass(frozen=True, slots=True)
class Message:
    """A method to call; `reply_to` is 0 when nobody waits for an answer."""

    method: str
    args: tuple[Any, ...]
    reply_to: int = 0


NEWS = -1
"""`reply_to` of an answer that nobody asked for and that is no error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method returned or raised; `reply_to` 0 is an error that nobody asked for, and ends the run."""

    reply_to: int
    value: Any = None
    error: BaseException | None = None


class Channel:
    """The controller's end. Made and used in the event loop's thread.

    Args:
        connection: one end of the pair.
        who: the worker's name, for messages.
        explain: returns the error for a socket that ended, from what the socket says.
        on_news: called, in the event loop, with what the worker tells of itself.
        on_lost: called once, in the event loop, with the reason when the worker fails or its socket ends.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        who: str,
        explain: Callable[[str], Exception],
        on_news: Callable[[Any], None],
        on_lost: Callable[[Exception], None],
    ):
        self._connection = connection
        self._who = who
        self._explain = explain
        self._on_news = on_news
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lost: Exception | None = None
        self._is_closed = False
        self._threads = [
            threading.Thread(target=target, name=f"thundersync-{who}-{name}", daemon=True)
            for name, target in (("reader", self._read), ("writer", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def tell(self, method: str, *args: Any) -> None:
        """Send a call that has no answer; what it raises ends the run."""
        if self._lost is None:
            self._send(Message(method, args))

    async def ask(self, method: str, *args: Any, limit_s: float) -> Any:
        """Send a call and return its result, or raise what it raised.

        Raises:
            WorkerError: the worker is gone.
            WatchdogError: no answer within `limit_s`.
        """
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[number] = future
        self._send(Message(method, args, number))
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            raise WatchdogError(
                f"expected the {self._who} process to answer `{method}` within {limit_s:g} s, got no answer; "
                "look at what it does (py-spy dump), or raise the limit"
            ) from None
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """End the conversation; the worker ends when it sees that. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail(WorkerError(f"expected an open channel to the {self._who} process, got a call after `close`"))
        self._outbox.put(None)

    def _send(self, message: Message) -> None:
        # pickled here, so that what can't travel raises at its sender, and later changes don't travel
        self._outbox.put(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (data := self._outbox.get()) is not None:
                self._connection.send_bytes(data)
        # a shutdown, since closing a descriptor that the reader waits on would end nothing
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        reason = "its socket ended"
        try:
            while True:
                self._post(self._receive, self._connection.recv())
        except EOFError:
            pass
        except OSError as error:
            reason = str(error)
        except Exception as error:  # an answer that can't be unpickled
            reason = f"an answer could not be read: {type(error).__name__}: {error}"
        self._post(self._end, reason)
        self._outbox.put(None)
        self._threads[1].join()  # the writer has shut the socket down, or is about to
        self._connection.close()

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(function, *args)

    def _receive(self, answer: Answer) -> None:
        if answer.reply_to == NEWS:
            self._on_news(answer.value)
            return
        future = self._waiting.get(answer.reply_to)
        if future is not None and not future.done():
            if answer.error is not None:
                future.set_exception(answer.error)
            else:
                future.set_result(answer.value)
        elif answer.reply_to == 0 and isinstance(answer.error, Exception):
            self._lose(answer.error)

    def _end(self, reason: str) -> None:
        if self._lost is None:
            self._lose(self._explain(reason))

    def _lose(self, error: Exception) -> None:
        if self._lost is None and not self._is_closed:
            self._fail(error)
            self._on_lost(error)

    def _fail(self, error: Exception) -> None:
        self._lost = self._lost or error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: a caller that was cancelled never looks


class WorkerEnd:
    """The worker's end: blocking, single-threaded."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def has_message(self, timeout_s: float | None) -> bool:
        """Return whether a message is there; waits up to `timeout_s`, None for ever."""
        return self._connection.poll(timeout_s)

    def receive(self) -> Message:
        """Return the next message.

        Raises:
            EOFError: the controller closed its end, or died.
        """
        message = self._connection.recv()
        assert isinstance(message, Message)
        return message

    def answer(self, reply_to: int, value: Any) -> None:
        self._connection.send(Answer(reply_to, value))

    def tell(self, news: object) -> None:
        """Send what nobody asked for; it arrives before the next answer."""
        self._connection.send(Answer(NEWS, news))

    def fail(self, reply_to: int, error: BaseException) -> None:
        """Send an error; one that can't travel goes as its text."""
        try:
            data = pickle.dumps(Answer(reply_to, error=error))
            pickle.loads(data)
        except Exception:
            data = pickle.dumps(Answer(reply_to, error=WorkerError(f"{type(error).__name__}: {error}")))
        self._connection.send_bytes(data)

    def run(self, target: object, message: Message, *, before_answer: Callable[[], None] = lambda: None) -> None:
        """Call the method that a message names on `target`, and answer.

        Args:
            before_answer: called once the method has returned, if there is somebody to answer.

        Raises:
            Exception: of a call that nobody waits for, once it is sent.
        """
        try:
            value = getattr(target, message.method)(*message.args)
        except Exception as error:
            self.fail(message.reply_to, error)
            if not message.reply_to:
                raise
            return
        if message.reply_to:
            before_answer()
            self.answer(message.reply_to, value)
