"""A worker that costs as little as Python allows, for measuring what stands before it: `python -m
benchmarks.proxy_worker PORT`.

A request's `max_tokens` says how many chunks its stream has, and its `seed` how many microseconds are between them:
fields that every proxy passes on (some rename the first). The first chunk comes at once. Each says in its text when it
was written, by the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import sys
import time

import httptools
import uvloop

STAMP = re.compile(rb"t=(\d{20})")
"""A chunk's time in nanoseconds."""
_ANSWER = (
    b'{"id":"chatcmpl-0","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"hello"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
_WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_ANSWER), _ANSWER)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_EVENT = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"t=%020d "},"finish_reason":null}]}\n\n'
)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT % 0), _EVENT)
_STOP = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
_LAST = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_STOP), _STOP)
_STREAMS = re.compile(rb'"stream":\s*true')
_CHUNKS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_PAUSE_US = re.compile(rb'"seed":\s*(\d+)')
_ENDS = 4096
"""Of a body only this much is kept of either end; the fields looked for stand before or behind the messages."""


class Worker(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._start, self._end = b"", b""
        self._left = 0
        self._pause = self._next_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._start = self._end = b""

    def on_body(self, body: bytes) -> None:
        if len(self._start) < _ENDS:
            self._start += body[:_ENDS]
        self._end = (self._end + body)[-_ENDS:] if len(body) < _ENDS else body[-_ENDS:]

    def on_message_complete(self) -> None:
        fields = self._start + self._end
        if not _STREAMS.search(fields):
            self._transport.write(_WHOLE)
            return
        chunks, pause_us = _CHUNKS.search(fields), _PAUSE_US.search(fields)
        self._left = int(chunks[1]) if chunks else 1
        self._pause = int(pause_us[1]) / 1e6 if pause_us else 0.0
        # Streams that begin together must not go on in step.
        self._next_at = self._loop.time() - random.random() * self._pause
        self._transport.write(_HEAD)
        self._tick()

    def _tick(self) -> None:
        if self._transport.is_closing():
            return
        if not self._left:
            self._transport.write(_LAST)
            return
        self._left -= 1
        self._transport.write(_CHUNK % time.monotonic_ns())
        self._next_at += self._pause
        self._loop.call_at(self._next_at, self._tick)


async def serve(port: int) -> None:
    listener = socket.create_server(("127.0.0.1", port), backlog=4096)
    server = await asyncio.get_running_loop().create_server(Worker, sock=listener)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1])))
