"""Faults that tests and demonstrations order from a worker, for its next requests."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import Annotated, Literal

import msgspec
from starlette.types import Message, Send

Mode = Literal[
    "status", "hang", "reset", "slow", "cut", "fail", "drop", "handover", "crash", "freeze", "load", "refuse"
]
AT_ONCE = ("freeze", "load", "refuse")
"""What befalls the worker as soon as it is ordered, and no request."""
Count = Annotated[int, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One order, the JSON of `POST /mock/faults`.

    - `status`: answer at once with `status` and `headers` and an error in the shape of the request's API.
    - `hang`: never answer, not even a head; ends when the client leaves.
    - `reset`: reset the connection (TCP RST) in place of the token after `after_tokens` tokens (in place of the last
      token at the latest), or in place of the whole answer of a turn that does not stream. A stream's head is sent
      before.
    - `slow`: serve with `ttft_ms` and `itl_ms` instead of the worker's own, where given, and end a stream (its zero
      chunk) `end_ms` after its last event.
    - `cut`: break a stream off after `after_events` events, with `middle` in the middle of the next one's `data:` line,
      and then as `then` says: `close` the connection, `reset` it, or `end` as if all were said (with the zero chunk).
      A stream with no more events is cut in place of its end. What does not stream is cut in the middle of its body.
    - `fail`: say after `after_tokens` tokens (in place of the end at the latest) in the API's own way that the answer
      failed, and end. What does not stream is answered with 500.
    - `drop`: answer, and then close the connection without having said that it will be.
    - `handover`: what is said of the blocks that stay for another worker is not said (`how`: `missing`), lacks a part
      (`malformed`), or leads to what is gone already (`gone`). Where two workers meet, the transfer fails.
    - `crash`: reset the connections of all running turns and lose what is cached, as when the process has died; what is
      asked in the next `seconds` is answered as while loading.

    Some are no request's but the worker's, and begin when they are ordered:

    - `freeze`: answer nothing and say no token for `seconds`; what was due meanwhile comes then.
    - `load`: answer 503 for `seconds`, probes as well, since the model is being loaded.
    - `refuse`: refuse new connections for `seconds`.
    """

    mode: Mode
    times: Annotated[int, msgspec.Meta(ge=1)] | None = 1
    """How many requests it hits; null: every one until the faults are cleared."""
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 503
    headers: dict[str, str] = {}
    after_tokens: Count = 0
    after_events: Count = 0
    middle: bool = True
    then: Literal["close", "reset", "end"] = "close"
    how: Literal["missing", "malformed", "gone"] = "missing"
    ttft_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None
    end_ms: Milliseconds = 0
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    contains: str = ""
    """Hits only turns in whose prompt this is (a prompt that kills whoever reads it); other requests pass it by."""
    probes: bool = False
    """Probes suffer it too, as long as it is the first order, and are not counted in `times`."""


class Faults:
    """Orders, first come, first served: one request takes at most one fault."""

    def __init__(self) -> None:
        self._orders: deque[Fault] = deque()

    def order(self, fault: Fault) -> None:
        self._orders.append(fault)

    def take(self, prompt: bytes = b"") -> Fault | None:
        """The fault that the request that begins now must suffer."""
        if not self._orders:
            return None
        fault = self._orders[0]
        if fault.contains and fault.contains.encode() not in prompt:
            return None
        if fault.times is not None:
            fault.times -= 1
            if not fault.times:
                self._orders.popleft()
        return fault

    def of_probes(self) -> Fault | None:
        """What a probe that comes now must suffer."""
        return self._orders[0] if self._orders and self._orders[0].probes else None

    def pending(self) -> list[Fault]:
        return list(self._orders)

    def clear(self) -> None:
        """Withdraw all orders. Requests that suffer one already go on suffering."""
        self._orders.clear()


class FaultySend:
    """An ASGI `send` whose answer suffers `cut`, `drop`, or the late end of `slow`. What comes after a cut is lost."""

    def __init__(self, send: Send, fault: Fault) -> None:
        self._send = send
        self._fault = fault
        self._events = 0
        self._streams = False
        self._cut = False

    async def __call__(self, message: Message) -> None:
        if self._cut:
            return
        if message["type"] == "http.response.start":
            self._streams = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            )
        elif self._fault.mode == "cut":
            kept = self._kept(message.get("body", b""))
            if kept is not None:
                await self._break(kept)
                return
            if not message.get("more_body", False):
                await self._break(message.get("body", b""))
                return
        elif self._fault.mode == "drop":
            if not message.get("more_body", False):
                await self._send(message)
                _transport(self._send).close()
                return
        elif self._streams and not message.get("more_body", False):
            await asyncio.sleep(self._fault.end_ms / 1000)
        await self._send(message)

    def _kept(self, body: bytes) -> bytes | None:
        """What of `body` still goes out before the cut; None: the cut is not in there."""
        if not self._streams:
            return body[: len(body) // 2] if body else None
        place = 0
        while place < len(body):
            if self._events == self._fault.after_events:
                if not self._fault.middle:
                    return body[:place]
                line = body.index(b"data:", place)
                return body[: (line + body.index(b"\n", line)) // 2]
            place = body.index(b"\n\n", place) + 2
            self._events += 1
        return None

    async def _break(self, kept: bytes) -> None:
        self._cut = True
        end = self._fault.then == "end" and self._streams
        await self._send({"type": "http.response.body", "body": kept, "more_body": not end})
        if self._fault.then == "reset":
            await asyncio.sleep(0.005)  # what was written just now would be lost
            reset_connection(self._send)
        elif not end:
            _transport(self._send).close()


def reset_connection(send: Send) -> None:
    """Close the client's connection at once and with a TCP RST, as a crashing worker does.

    What was written in this round of the event loop may be lost. Raises RuntimeError under another server than uvicorn,
    which breaks the connection too.
    """
    transport = _transport(send)
    connection = transport.get_extra_info("socket")
    if connection is not None and not transport.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _transport(send: Send) -> asyncio.Transport:
    """ASGI has no way to break a connection, hence this look into uvicorn's `send`."""
    transport: asyncio.Transport | None = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        raise RuntimeError("a connection can only be broken under uvicorn")
    return transport
