"""One request for a worker and its answer: what a turn reads of the client and writes to it.

The answer's head travels with the first piece of the body when that is there, in one system call; each further piece
goes to the client's socket within the call that brings it.
"""

from __future__ import annotations

import abc
import asyncio
import http
import logging
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Protocol

from app.errors import ClientDisconnected, TurnError
from app.http.headers import Header
from app.http.inplace import Wake, Write, direct_write

log = logging.getLogger("coatcheck.server")


class Turn(Protocol):
    """What is told of the client, once it has been opened for an exchange."""

    def start(self) -> None: ...
    def cancel(self) -> None: ...
    def client_left(self) -> None: ...
    def client_took(self) -> None: ...


class Proxy(Protocol):
    """Opens a turn for each exchange. The turn calls `over` once, when it has ended, with a fault if it has one."""

    def open(self, exchange: Exchange, over: Callable[[Exception | None], None]) -> Turn: ...


_PHRASES = {status.value: status.phrase for status in http.HTTPStatus}
STATUS_LINES = {status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(100, 600)}
_MUCH = 65536
"""Bytes that wait for the turn from which on the client is not read, unless the turn waits for more than these."""
_LEFT_OVER = 64 << 20
"""Bytes that are still read after an answer."""
_RESET = struct.pack("ii", 1, 0)
_line = b": ".join
_FIRST_LINES = {status: line.removesuffix(b"\r\n") for status, line in STATUS_LINES.items()}


def head_bytes(first_line: bytes, headers: Iterable[Header]) -> bytes:
    return b"".join([first_line, *[b"%b: %b\r\n" % pair for pair in headers], b"\r\n"])


class Connection(asyncio.Protocol, abc.ABC):
    """The socket that exchanges are read from and written to."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    peer: str | None
    scheme: bytes
    write: Write
    """Does nothing when there is no connection any more."""
    # Whether we have paused the transport, and whether it has told us to pause.
    read_paused = False
    write_paused = False
    left_over = 0
    """Bytes that came and that nobody wanted, since the last answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport, self.write = transport, direct_write(transport)
        self.loop = asyncio.get_running_loop()
        address = transport.get_extra_info("peername")
        self.peer = address[0] if isinstance(address, tuple) else None
        self.scheme = b"https" if transport.get_extra_info("sslcontext") else b"http"

    def pause_writing(self) -> None:
        self.write_paused = True

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def unwanted(self, size: int) -> None:
        self.left_over += size
        if self.left_over > _LEFT_OVER:
            self.transport.close()

    @abc.abstractmethod
    def open(self, exchange: Exchange, over: Callable[[Exception | None], None]) -> Turn:
        """As the proxy of what no other answers to."""

    @abc.abstractmethod
    def enqueue(self, exchange: Exchange) -> None:
        """Its head was read. It is answered when its turn comes."""

    @abc.abstractmethod
    def answered(self, keep_alive: bool) -> None:
        """The answer that is being written is complete."""

    @abc.abstractmethod
    def ended(self, exchange: Exchange) -> None:
        """Its turn has ended."""


class Exchange:
    """One request and its answer. Of its many short methods some are for its connection, and some for its turn."""

    # Defaults in the class: these are seldom looked at. To read one takes four times as long as to read an instance's.
    http_1_1 = True
    _least = 1
    _news: Wake | None = None
    _refusal: TurnError | None = None
    status = 0
    """What was answered; 0: nothing yet."""
    response_started = False
    # Of the answer's body, if it was not whole from the start.
    pieces = 0

    def __init__(
        self, connection: Connection, proxy: Proxy, method: bytes, raw_path: bytes, query: bytes, headers: list[Header]
    ) -> None:
        self._connection, self._proxy = connection, proxy
        self.peer, self.scheme = connection.peer, connection.scheme
        self.method, self.raw_path, self.query, self.headers = method, raw_path, query, headers
        self.switches = b""
        """The protocol that the head asks to go on with."""
        self.keep_alive = self.more_body = True
        self.expects_continue = False
        # The request: `_pieces` are the `_size` bytes of its body that wait for the turn, which is woken by `_news`,
        # while it waits, when there are `_least` of them, or no `more_body` is to come, or none that can be read
        # (`_refusal`).
        self._pieces: list[bytes] = []
        self._size = 0
        # The answer: `_head` has been given and not been written; `_chunked`, `_sized` (the client sees the end by
        # itself) and `_no_body` say how the body goes, once `response_started`. Nothing is written when `disconnected`.
        self.response_complete = self.disconnected = False
        self._head: bytes | None = None
        self._chunked = self._sized = self._no_body = False
        self.begun = False
        self._turn: Turn | None = None
        """From `begin` to its end, which may be long after the answer's."""
        self.mark: Callable[[list[Header]], list[Header]] | None = None
        """What is done to the answer's headers, whoever gives it: for the request of another site's page."""

    # -- what its connection tells

    def begin(self) -> None:
        self.begun = True
        self._turn = turn = self._proxy.open(self, self._ended)
        turn.start()

    def feed(self, data: bytes) -> None:
        """A piece of the body has come. The turn hears of it by `wake`."""
        if self.response_complete:
            self._connection.unwanted(len(data))
        elif data:
            self._pieces.append(data)
            self._size += len(data)
            if self._size > _MUCH and self._size >= self._least:
                self._connection.pause_reading()

    def received(self) -> None:
        """The request is complete, but for what follows in another protocol."""
        if not self.switches:
            self.more_body = False

    def wake(self) -> None:
        if self._news is not None and (self._size >= self._least or not self.more_body):
            self._tell()

    def give_up(self, error: TurnError) -> None:
        """The rest of the body cannot be read. The turn, which has begun, takes care of the answer."""
        self.keep_alive = False
        self._refusal = error
        self._tell()

    def left(self) -> None:
        """The connection is gone, and the answer is not complete."""
        self.disconnected = True
        self._tell()  # which may end the turn
        if self._turn is not None:
            self._turn.client_left()

    def took(self) -> None:
        """What was written has gone."""
        if self._turn is not None:
            self._turn.client_took()

    def cancel(self, msg: object = None) -> None:
        """As uvicorn does with the tasks that did not end in time."""
        if self._turn is not None:  # not in place: the set that we are in is being gone through
            self._connection.loop.call_soon(self._turn.cancel)

    def _tell(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set()

    def _ended(self, fault: Exception | None) -> None:
        self._turn = None
        if fault is not None:
            log.error("a turn failed after its answer had begun", exc_info=fault)
        if not self.response_complete and not self.disconnected:
            self.flush()
            self._cut()
        self._connection.ended(self)

    def _cut(self) -> None:
        """Close, behind what was written, without the end that the client waits for. Where closing is the end, only a
        reset says that it is none."""
        transport = self._connection.transport
        if self.response_started and not self._sized and not self._chunked:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            if not transport.get_write_buffer_size() or self.scheme == b"https":  # TLS would end it cleanly
                transport.abort()
                return
        transport.close()

    # -- what a turn asks for

    def received_already(self, least: int) -> tuple[bytes, bool] | None:
        """What `receive` would return without waiting; None: it has to wait, or raises."""
        if self.expects_continue or self.disconnected or (self.more_body and self._size < least):
            return None
        return self._taken()

    def _taken(self) -> tuple[bytes, bool]:
        pieces = self._pieces
        taken = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._size = 0
        if self._connection.read_paused:
            self._connection.resume_reading()
        return taken, self.more_body

    async def receive(self, least: int = 1) -> tuple[bytes, bool]:
        """At least so many bytes of the body, or its rest; then whether more may come. Raises ClientDisconnected, or
        TurnError for what cannot be read."""
        self._least = least
        if self.expects_continue:
            self.expects_continue = False
            if self.more_body and not self._pieces and not self.response_started:
                self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.more_body and self._size < least:
            if self._refusal is None and not self.disconnected:
                self._connection.resume_reading()
                self._news = news = Wake()
                await news
            if self._refusal is not None and self.more_body and self._size < least:
                raise self._refusal
        if self.disconnected:
            raise ClientDisconnected
        return self._taken()

    def watch(self) -> None:
        # A connection that is not read is not seen to close.
        self._connection.resume_reading()

    def interim(self, status: int, headers: list[Header]) -> None:
        if self.http_1_1 and not self.response_started and not self.disconnected:
            self._connection.transport.write(head_bytes(STATUS_LINES[status], headers))

    def start(self, status: int, headers: list[Header], lines: bytes = b"") -> None:
        """Begin the answer. `lines`: more headers, written out, each behind a line's end."""
        self.response_started = True
        self.status = status
        self.expects_continue = False
        if self.mark is not None:
            headers = self.mark(headers)
        head = b"\r\n".join([_FIRST_LINES[status], *map(_line, headers)]) + lines
        if self.switches:
            self.keep_alive = False  # what was sent behind the request is no HTTP
            if status == 101:
                self._sized = True
                self._head = head + b"\r\nconnection: upgrade\r\nupgrade: " + self.switches + b"\r\n\r\n"
                return
        if self.method == b"HEAD" or status in (204, 304):
            self._no_body = self._sized = True
        elif b"\r\ncontent-length: " in head:
            self._sized = True
        elif self.http_1_1:
            self._chunked = True
            head += b"\r\ntransfer-encoding: chunked"
        else:
            self.keep_alive = False
        self._head = head + (b"\r\n\r\n" if self.keep_alive else b"\r\nconnection: close\r\n\r\n")

    def write(self, data: bytes, end: bool) -> bool:
        if self.disconnected:
            return True
        if self._no_body:
            data = b""
        elif data and not self._sized:
            self.pieces += 1
        if self._chunked:
            if data:
                data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if end else b"%x\r\n%b\r\n" % (len(data), data)
            elif end:
                data = b"0\r\n\r\n"
        if self._head is not None:
            data = self._head + data
            self._head = None
        connection = self._connection
        if data:
            connection.write(data)
        if end:
            self.response_complete = True
            if self._pieces:
                self._pieces = []
            connection.answered(self.keep_alive)
            return True
        return not connection.write_paused

    def write_chunk(self, frame: bytes, start: int) -> bool:
        if self._head is not None or not self._chunked:
            return self.write(frame[start:-2], False)
        self.pieces += 1
        connection = self._connection
        connection.write(frame)
        return not connection.write_paused

    def flush(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self.disconnected:
            self._connection.write(head)
