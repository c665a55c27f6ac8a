"""The client's side of a turn under any ASGI server. Our own server needs none of it (`app/http/client.py`)."""

from __future__ import annotations

import asyncio
import logging
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, MutableMapping
from typing import Any, Protocol

from app.errors import ClientDisconnected
from app.http.headers import Header
from app.http.inplace import Driven, Wake

log = logging.getLogger("coatcheck.asgi")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]


class Turn(Protocol):
    """What a server tells a turn (`app.turn.turn.Turn`)."""

    def start(self) -> None: ...
    def cancel(self) -> None: ...
    def client_left(self) -> None: ...
    def client_took(self) -> None: ...
    def client_failed(self, fault: Exception) -> None: ...


class AsgiClient:
    """A request as an ASGI server gives it (`app.turn.turn.Client`). The server's `send` and `receive` are driven: they
    must await only futures, as those of servers do."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: bytes = scope["method"].encode()
        self.raw_path: bytes = scope["raw_path"]
        self.query: bytes = scope["query_string"]
        self.headers: list[Header] = list(scope["headers"])
        client = scope.get("client")
        self.peer: str | None = client[0] if client else None
        self.scheme: bytes = scope["scheme"].encode()
        self.switches = b""  # ASGI does not offer it
        self._receive, self._send = receive, send
        self._sending = Driven(self._sent, self._failed)
        self._waiting: deque[Message] = deque()
        self._is_sending = False
        self._listening: Driven | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turn: Turn | None = None

    async def run(self, open_turn: Callable[[AsgiClient, Callable[[Exception | None], None]], Turn]) -> None:
        """All of the turn. Raises what the server must know of."""
        self._turn = turn = open_turn(self, self._ended)
        try:
            turn.start()
            await self._over
        except asyncio.CancelledError:
            turn.cancel()
            raise
        finally:
            self._turn = None
            self._stop_listening()
            self._sending.close()

    def _ended(self, fault: Exception | None) -> None:
        if self._over.done():
            return
        if fault is not None:
            self._over.set_exception(fault)
        else:
            self._over.set_result(None)

    # -- what a turn asks for

    async def receive(self, least: int = 1) -> tuple[bytes, bool]:
        pieces, size, more = [], 0, True
        while more and size < least:
            message = await _in_place(self._receive())
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            more = message.get("more_body", False)
        return b"".join(pieces), more

    def watch(self) -> None:
        self._listening = Driven(self._received, self._deaf)
        self._listening.start(_in_place(self._receive()))

    def interim(self, status: int, headers: list[Header]) -> None:
        """ASGI has no message for it."""

    def start(self, status: int, headers: list[Header]) -> None:
        self._post({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes, end: bool) -> bool:
        if end:
            self._stop_listening()  # the server answers a pending receive() with a disconnect when all is sent
        if data or end:
            self._post({"type": "http.response.body", "body": data, "more_body": not end})
        return not self._is_sending

    def write_chunk(self, frame: bytes, start: int) -> bool:
        return self.write(frame[start:-2], False)

    def flush(self) -> None:
        pass

    # -- the server's coroutines

    def _post(self, message: Message) -> None:
        if self._is_sending:
            self._waiting.append(message)
        else:
            self._is_sending = True
            self._sending.start(_in_place(self._send(message)))

    def _sent(self, _: object) -> None:
        self._is_sending = False
        if not self._waiting:
            if self._turn is not None:
                self._turn.client_took()
            return
        message = self._waiting.popleft()
        while self._waiting and self._waiting[0]["type"] == message["type"]:
            other = self._waiting.popleft()
            message["body"] += other["body"]
            message["more_body"] = other["more_body"]
        self._post(message)

    def _received(self, message: Message | None) -> None:
        if message is not None and message["type"] == "http.request":
            assert self._listening is not None
            self._listening.start(_in_place(self._receive()))
        elif self._turn is not None:
            self._turn.client_left()

    def _failed(self, fault: Exception) -> None:
        if self._turn is not None:
            self._turn.client_failed(fault)

    def _deaf(self, fault: Exception) -> None:
        log.error("the server cannot tell when a client leaves", exc_info=fault)
        self._received(None)

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None


@types.coroutine
def _in_place(work: Coroutine[Any, Any, Any]) -> Generator[Wake, None, Any]:
    """What a server's coroutine answers, which awaits futures."""
    step: Callable[[], Any] = lambda: work.send(None)  # noqa: E731
    try:
        while True:
            try:
                future = step()
            except StopIteration as stop:
                return stop.value
            done = Wake()
            if future is None:  # a bare yield, as of asyncio.sleep(0)
                asyncio.get_running_loop().call_soon(done.set)
            else:
                future._asyncio_future_blocking = False  # as a Task does with a future it is given
                future.add_done_callback(lambda _, done=done: done.set())
            try:
                yield done
            except BaseException as error:
                step = lambda error=error: work.throw(error)  # type: ignore[misc]  # noqa: E731
            else:
                step = lambda: work.send(None)  # noqa: E731
    finally:
        work.close()
