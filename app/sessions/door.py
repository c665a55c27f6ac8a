"""Where peers come in: what they ask and tell (`peers`) is brought to the desk, and its answers back."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from app.errors import ClientDisconnected, TurnError
from app.http.exchange import Exchange, Turn
from app.http.headers import Header, header
from app.http.inplace import Driven, Wake
from app.sessions.peers import AT_ONCE, MOST_BYTES, QUICK, SLOW, UP, Ask, Known, Message, Reply

_STORE_LIMIT = 1.0
"""Seconds that what a peer asks of the store here may take."""
_encode = msgspec.json.Encoder().encode
_decode_message = msgspec.json.Decoder(Message).decode


class Desk(Protocol):
    """Answers what peers ask. Nothing but `bind` and `close` may wait, and nothing raises but TurnError."""

    @property
    def state(self) -> str: ...
    def where(self, ask: Ask) -> Known | None: ...
    def closed(self, ask: Ask) -> None: ...
    def ended(self, ask: Ask) -> None: ...
    def moved(self, ask: Ask) -> None: ...
    def health(self, ask: Ask) -> None: ...
    async def bind(self, ask: Ask) -> Known | None: ...
    async def close(self, ask: Ask) -> Known | None: ...


class Door:
    """Where peers come in: the proxy of the peers' own listener (`app.http.exchange.Proxy`)."""

    def __init__(self, token: str, desk: Callable[[], Desk]) -> None:
        """`token` proves that it is a peer; `desk` is asked for when one comes."""
        self.token = token
        self._expected, self._desk = b"Bearer " + token.encode(), desk

    def open(self, exchange: Exchange, over: Callable[[Exception | None], None]) -> Turn:
        return _Visit(exchange, self._expected, self._desk, over)


class _Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Visit:
    """One message of a peer."""

    def __init__(
        self, exchange: Exchange, expected: bytes, desk: Callable[[], Desk], over: Callable[[Exception | None], None]
    ) -> None:
        self._exchange, self._expected, self._desk = exchange, expected, desk
        self._driven = Driven(lambda _: over(None), over)
        self._work: asyncio.Future[list[Known | None]] | None = None

    def start(self) -> None:
        self._driven.start(self._run())

    def cancel(self) -> None:
        if self._work is not None:
            self._work.cancel()
        self._driven.cancel()

    def client_left(self) -> None: ...
    def client_took(self) -> None: ...

    async def _run(self) -> None:
        try:
            answers = await self._answers()
            self._say(200, _encode(Reply(self._desk().state, answers)))
        except _Refused as refusal:
            self._exchange.keep_alive = False
            self._say(refusal.status, _encode({"error": {"message": str(refusal)}}))
        except (ClientDisconnected, TurnError):
            pass  # its connection is gone, or is closed with the server's own word

    async def _answers(self) -> list[Known | None]:
        exchange = self._exchange
        given = header(exchange.headers, b"authorization") or b""
        if not hmac.compare_digest(given, self._expected):
            raise _Refused(401, "this is for the replicas of the router alone")
        if exchange.method != b"POST" or exchange.raw_path not in (QUICK, SLOW):
            raise _Refused(404, "there is nothing here")
        pieces, size, more = [], 0, True
        while more:
            piece, more = await exchange.receive()
            pieces.append(piece)
            size += len(piece)
            if size > MOST_BYTES:
                raise _Refused(413, f"a message has at most {MOST_BYTES} bytes")
        try:
            message = _decode_message(b"".join(pieces))
        except msgspec.DecodeError as error:
            raise _Refused(400, str(error)) from None
        if len(message.asks) > AT_ONCE:
            raise _Refused(413, f"a message has at most {AT_ONCE} questions")
        desk = self._desk()
        if exchange.raw_path == QUICK:
            return [_quick(desk, ask) for ask in message.asks]
        # Not in place: it waits for the store.
        self._work = work = asyncio.ensure_future(_slow(desk, message.asks))
        done = Wake()
        work.add_done_callback(lambda _: done.set())
        await done
        return work.result()

    def _say(self, status: int, body: bytes) -> None:
        headers: list[Header] = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        self._exchange.start(status, headers)
        self._exchange.write(body, True)


_HEARD = Known()


def _quick(desk: Desk, ask: Ask) -> Known | None:
    if ask.do == "where":
        return desk.where(ask)
    news = {"closed": desk.closed, "ended": desk.ended, "moved": desk.moved, "health": desk.health}.get(ask.do)
    if news is None:
        return None
    news(ask)
    return _HEARD


async def _slow(desk: Desk, asks: list[Ask]) -> list[Known | None]:
    works: dict[str, Callable[[Ask], Awaitable[Known | None]]] = {"bind": desk.bind, "close": desk.close}

    async def one(ask: Ask) -> Known | None:
        work = works.get(ask.do)
        if work is None:
            return None
        try:
            async with asyncio.timeout(_STORE_LIMIT):
                return await work(ask)
        except TimeoutError:
            return None
        except TurnError as refusal:
            # Of the session or the turn, not of the store, it says nothing of who else asks.
            well = desk.state == UP and refusal.code != "store_unavailable"
            return Known(how="refused") if well else None

    return list(await asyncio.gather(*map(one, asks)))
