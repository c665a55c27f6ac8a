"""A client that speaks bytes: it sees how a body ends, and when each byte came.

The usual clients hide both, and both are promises of the router: a broken answer must not look complete, and a token
must not wait for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

LIMIT = 30.0
"""Seconds that any one answer may take."""

Headers = Sequence[tuple[str, str]]


class Cut(Exception):
    """The connection ended before the message was complete."""


@dataclass(frozen=True)
class Head:
    status: int
    headers: list[tuple[str, str]]
    """Names in lower case, as they came otherwise."""

    def get(self, name: str) -> str | None:
        return next(iter(self.all(name)), None)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


@dataclass(frozen=True)
class Answer(Head):
    body: bytes

    @property
    def worker(self) -> str | None:
        return self.get("x-coatcheck-worker")

    @property
    def affinity(self) -> str | None:
        return self.get("x-coatcheck-affinity")

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """One connection: `async with await Wire.to(url) as wire`. Leaving the block resets what is left of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host
        self._buffer = bytearray()
        self._methods: list[str] = []
        self._left: int | None = 0
        """Bytes that are to come of the body, or of its chunk; None: up to the connection's end."""
        self._chunked = False
        self._ended = True

    @classmethod
    async def to(cls, url: str) -> Self:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        return cls(reader, writer, parts.netloc)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    # -- sending

    def request(self, method: str, target: str, headers: Headers = (), body: bytes | None = None) -> None:
        """Hand a request to the kernel, without awaiting. Its Host is where it goes, unless `headers` say another."""
        own = [] if any(name == "host" for name, _ in headers) else [f"host: {self._host}"]
        lines = [f"{method} {target} HTTP/1.1", *own, *(f"{k}: {v}" for k, v in headers)]
        if body is not None:
            lines.append(f"content-length: {len(body)}")
        self._methods.append(method)
        self.write("".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1") + (body or b""))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        """Wait until the kernel has taken most of what was written."""
        await self._writer.drain()

    def chat(self, **options: Any) -> None:
        """Ask for a chat completion; options of `chat_request`."""
        self.request("POST", "/v1/chat/completions", *chat_request(**options))

    def leave(self) -> None:
        """Close as a client does that wants no more."""
        self._writer.transport.abort()

    def reset(self) -> None:
        """Close as a client does that has crashed."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def finish_sending(self) -> None:
        """Close the sending half only."""
        self._writer.write_eof()

    # -- receiving

    async def head(self) -> Head:
        """The next response's head. A 1xx response is one like any other here."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            await self._more()
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        pairs = (line.partition(":") for line in lines[1:])
        head = Head(int(lines[0].split()[1]), [(name.lower(), value.strip()) for name, _, value in pairs])
        if head.status >= 200:
            self._expect_body(head, self._methods.pop(0))
        return head

    async def read(self) -> bytes:
        """The next bytes of the body as they come; none at its clean end. Raises Cut."""
        while not self._ended:
            if self._chunked and not self._left:
                size = int((await self._line()).split(b";")[0], 16)
                if size:
                    self._left = size + 2  # its line end is taken off below
                    continue
                while await self._line():
                    pass
                self._ended = True
                break
            if not self._buffer:
                try:
                    await self._more()
                except Cut:
                    if self._left is None:
                        self._ended = True
                        break
                    raise
            if (piece := self._take()) is not None:
                return piece
        return b""

    async def until(self, marker: bytes) -> bytes:
        """The body's bytes up to the moment when `marker` was among them. Raises Cut."""
        got = bytearray()
        while marker not in got:
            piece = await self.read()
            if not piece:
                raise Cut(f"the body has ended without {marker!r}")
            got += piece
        return bytes(got)

    async def until_body(self, marker: bytes) -> bytes:
        """As `until`, of a response whose head has not been read."""
        await self.head()
        return await self.until(marker)

    async def body(self) -> bytes:
        """The whole body. Raises Cut."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    async def until_cut(self) -> bytes:
        """What comes of the body before it is cut. Raises AssertionError if it ends cleanly."""
        got = bytearray()
        try:
            while piece := await self.read():
                got += piece
        except Cut:
            return bytes(got)
        raise AssertionError(f"a clean end, after {bytes(got)[-200:]!r}")

    async def answer(self) -> Answer:
        head = await self.head()
        return Answer(head.status, head.headers, await self.body())

    async def closed(self) -> bool:
        """Whether the other side ends the connection now, with nothing more to say."""
        try:
            await self._more()
        except Cut:
            return True
        return False

    def _expect_body(self, head: Head, method: str) -> None:
        self._chunked = (head.get("transfer-encoding") or "").lower() == "chunked"
        length = head.get("content-length")
        self._left = 0 if self._chunked else None if length is None else int(length)
        self._ended = method == "HEAD" or head.status in (204, 304) or (length == "0" and not self._chunked)

    def _take(self) -> bytes | None:
        """What the buffer has of the body, or None when those were only a chunk's line end."""
        size = len(self._buffer) if self._left is None else min(self._left, len(self._buffer))
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        if self._left is not None:
            self._left -= size
            if not self._chunked:
                self._ended = not self._left
            elif self._left < 2:
                piece = piece[: size - (2 - self._left)] if size >= 2 - self._left else b""
        return piece or None

    async def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            await self._more()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    async def _more(self) -> None:
        try:
            async with asyncio.timeout(LIMIT):
                data = await self._reader.read(262144)
        except (ConnectionError, ssl.SSLError) as error:
            raise Cut(str(error)) from error
        if not data:
            raise Cut("the connection has ended")
        self._buffer += data


def chat_request(
    *,
    session: str | None = None,
    final: bool = False,
    stream: bool = False,
    content: str = "Hello.",
    tokens: int | None = 2,
    messages: Iterable[Mapping[str, str]] | None = None,
    headers: Headers = (),
    model: str = "mock-model",
) -> tuple[Headers, bytes]:
    """Headers and body of a chat completion's request."""
    body: dict[str, Any] = {
        "model": model,
        "stream": stream,
        "messages": [{"role": "user", "content": content}] if messages is None else list(messages),
    }
    if tokens is not None:
        body["max_tokens"] = tokens
    fields = [("content-type", "application/json"), *headers]
    if session is not None:
        fields.append(("x-dynamo-session-id", session))
    if final:
        fields.append(("x-dynamo-session-final", "true"))
    return fields, json.dumps(body).encode()


async def ask(
    url: str, method: str = "GET", target: str = "/", headers: Headers = (), body: bytes | None = None
) -> Answer:
    """One request on a connection of its own."""
    async with await Wire.to(url) as wire:
        wire.request(method, target, headers, body)
        return await wire.answer()


async def turn(url: str, **options: Any) -> Answer:
    """One chat completion on a connection of its own; options of `chat_request`."""
    headers, body = chat_request(**options)
    return await ask(url, "POST", "/v1/chat/completions", headers, body)
