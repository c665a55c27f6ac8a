"""The hand-over of a prompt between two workers that are asked at once, as SGLang does it
(`sglang/srt/disaggregation/`, read at 0.5.23).

Both requests name the same *room*, and where whoever prefills is met (`bootstrap_host`, `bootstrap_port`); one that
names none is refused. The worker that prefills computes a prompt when the one that decodes has come, one token whatever
the request allows, and answers when the blocks have been fetched. The one that decodes waits for them. Who waits in
vain, or whose other side leaves or fails, fails; and a room in which somebody has waited in vain was *stranded*.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec

from mocker.handover import BLOCK_SIZE, Bytes, NotFetched, decode_bytes, encode
from mocker.settings import KvTransfer
from mocker.wire import RequestError

_ANSWER_WITHIN = 5.0
"""Seconds."""


class Place(msgspec.Struct):
    """Where a request is met."""

    host: str
    port: int
    room: int


class _Joins(msgspec.Struct):
    room: int


def place_of(said: dict[str, Any] | None) -> Place:
    """Where a request is to be met. Raises RequestError, as SGLang's scheduler does it."""
    try:
        return msgspec.convert(said, Place)
    except msgspec.ValidationError:
        message = "Invalid request: Disaggregated request received without bootstrap room id."
        raise RequestError(400, message) from None


_decode_joins = msgspec.json.Decoder(_Joins).decode


class Room:
    """Of the worker that prefills, as long as it has the request. Made inside the running loop."""

    def __init__(self, tokens: int) -> None:
        loop = asyncio.get_running_loop()
        self.tokens = tokens
        self.joined: asyncio.Future[bool] = loop.create_future()
        self.computed: asyncio.Future[bool] = loop.create_future()
        self.fetched: asyncio.Future[bool] = loop.create_future()
        """Each is True, or False when it will not be."""

    @property
    def blocks(self) -> int:
        return max(1, -(-self.tokens // BLOCK_SIZE))

    def close(self) -> None:
        """Its request has ended, or the other side has left. Idempotent."""
        for each in (self.joined, self.computed, self.fetched):
            if not each.done():
                each.set_result(False)


class Rooms:
    """Both sides of one worker."""

    def __init__(self, settings: KvTransfer) -> None:
        """Binds the place where it is met. Raises OSError."""
        self._settings = settings
        self._socket = socket.create_server((settings.host, settings.port), backlog=512)
        self.host, self.port = self._socket.getsockname()[:2]
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: dict[int, asyncio.Future[None]] = {}
        """Rooms that are not open, and in which somebody waits."""
        self.staged: dict[int, Room] = {}
        """By their numbers."""
        self.fetched = self.expired = 0
        """Rooms whose blocks were fetched, and in which somebody has waited in vain."""

    @property
    def blocks(self) -> int:
        """Of the rooms that are open."""
        return sum(room.blocks for room in self.staged.values())

    # -- where the prompt is computed

    @contextlib.contextmanager
    def open(self, number: int, tokens: int) -> Iterator[Room]:
        """Its request has come, and is there."""
        room = self.staged[number] = Room(tokens)
        awaited = self._awaited.pop(number, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(None)
        try:
            yield room
        finally:
            room.close()
            if self.staged.get(number) is room:
                del self.staged[number]

    async def joined(self, room: Room) -> None:
        """Raises NotFetched when nobody comes in time."""
        await asyncio.wait({room.joined}, timeout=self._settings.lease_s)
        if not room.joined.done():
            self.expired += 1
        if not room.joined.done() or not room.joined.result():
            raise NotFetched("nobody has come for the prompt")

    async def handed_out(self, room: Room) -> None:
        """The prompt is computed, and is fetched now. Raises NotFetched."""
        if not room.computed.done():
            room.computed.set_result(True)
        if not await asyncio.shield(room.fetched):
            raise NotFetched("whoever came for the prompt has left")

    def restart(self) -> None:
        """As when the process has crashed."""
        for room in self.staged.values():
            room.close()
        self.staged.clear()

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer who comes, in `loop`."""
        self._spawn(self._listen(), loop)

    async def _listen(self) -> None:
        async with await asyncio.start_server(self._receive, sock=self._socket) as server:
            await server.serve_forever()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        room: Room | None = None
        said: asyncio.Future[bytes] | None = None
        try:
            async with asyncio.timeout(_ANSWER_WITHIN):
                number = _decode_joins(await reader.readline()).room
            said = asyncio.ensure_future(reader.readline())  # it has all, or has left
            room = await self._find(number, said)
            size = -1
            if room is not None:
                room.joined.set_result(True)
                either: set[asyncio.Future[Any]] = {room.computed, said}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if room.computed.done() and room.computed.result():
                    size = room.tokens * self._settings.token_bytes
            writer.write(encode(Bytes(size)) + b"\n")
            if room is not None and size >= 0 and await said and not room.fetched.done():
                self.fetched += 1
                room.fetched.set_result(True)
        except (OSError, ValueError, TimeoutError):
            pass  # whoever that was
        finally:
            if said is not None:
                said.cancel()
            if room is not None:
                room.close()
            writer.close()

    async def _find(self, number: int, said: asyncio.Future[bytes]) -> Room | None:
        """The room, when it is open; None: it is not in time, somebody is in it, or who asked has left."""
        if number not in self.staged:
            awaited = self._awaited.setdefault(number, asyncio.get_running_loop().create_future())
            either: set[asyncio.Future[Any]] = {awaited, said}
            await asyncio.wait(either, timeout=self._settings.lease_s, return_when=asyncio.FIRST_COMPLETED)
            if not awaited.done():
                self._awaited.pop(number, None)
                self.expired += not said.done()
        room = self.staged.get(number)
        return None if room is None or room.joined.done() else room

    def close(self) -> None:
        """Also while its loop runs, which must know of it."""
        for task in self._tasks:
            task.cancel()
        if not self._tasks:
            self._socket.close()

    # -- where the answer is said

    async def join(self, place: Place) -> int:
        """How many blocks were fetched from there. Whoever is cancelled has left. Raises NotFetched."""
        try:
            async with asyncio.timeout(_ANSWER_WITHIN):
                reader, writer = await asyncio.open_connection(place.host.strip("[]"), place.port)
        except (OSError, TimeoutError) as error:
            raise NotFetched(str(error)) from error
        with contextlib.closing(writer):
            try:
                writer.write(encode(_Joins(place.room)) + b"\n")
                size = decode_bytes(await reader.readline()).size
                if size < 0:
                    raise NotFetched("the prompt is not there")
                await asyncio.sleep(size / (self._settings.gb_s * 1e9))
                writer.write(b"done\n")
                await writer.drain()
            except (OSError, ValueError) as error:
                raise NotFetched(str(error)) from error
        return max(1, -(-size // (self._settings.token_bytes * BLOCK_SIZE)))

    def _spawn(self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
        task = loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
