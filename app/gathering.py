"""One answer to a scrape for all processes of `--processes N`, whichever of them it reaches.

Each process has a channel to their parent, a pair of sockets that nobody else can reach and that leaves nothing behind.
A process that is scraped asks the parent; the parent asks all of them, adds up (`exposition.Merging`, which remembers
what those had counted that are no more), and answers. It does so in a thread of its own; what it costs a process is to
say its figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec

from app.errors import TurnError
from app.exposition import Merging, text
from app.metrics import Family

log = logging.getLogger("coatcheck.metrics")

_SAYS_WITHIN = 1.0
"""Seconds that a process has to say its figures."""
_ANSWERS_WITHIN = 3.0
_LENGTH = struct.Struct("<I")


class _Frame(msgspec.Struct, array_like=True):
    """What goes through a channel: `here`, once, from who can be asked from now on; `say` and `said`, from the parent
    and back; `ask` and `answer`, from a process and back. `number` tells what belongs together."""

    kind: Literal["here", "say", "said", "ask", "answer"]
    number: int
    families: list[Family] = []
    open_metrics: bool = False
    text: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Frame).decode


class _Channel:
    """One end. What the other end has to say is given to `heard`."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[_Frame]] = {}
        self._numbers = itertools.count(1)
        self.opened = asyncio.Event()
        self.is_heard = False
        """Something has come from the other end."""

    async def listen(self, heard: Callable[[_Frame], Coroutine[Any, Any, None]]) -> None:
        """Until the other end is gone. `heard` is told of what is no reply."""
        reader, self._writer = await asyncio.open_connection(sock=self._end)
        self.send(_Frame("here", 0))
        self.opened.set()
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                frame = _decode(await reader.readexactly(size))
                self.is_heard = True
                if frame.kind == "here":
                    continue
                if frame.kind in ("said", "answer"):
                    waiting = self._waiting.pop(frame.number, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(frame)
                else:
                    task = asyncio.create_task(heard(frame))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
        except (OSError, EOFError):
            pass  # its process has ended
        finally:
            writer, self._writer = self._writer, None
            writer.close()
            for task in tasks:
                task.cancel()
            for waiting in self._waiting.values():
                waiting.cancel()

    def send(self, frame: _Frame) -> None:
        if self._writer is not None:
            body = _encode(frame)
            self._writer.write(_LENGTH.pack(len(body)) + body)

    async def ask(self, frame: _Frame, seconds: float) -> _Frame | None:
        """The reply, or None: none came in time."""
        frame.number = next(self._numbers)
        waiting = self._waiting[frame.number] = asyncio.get_running_loop().create_future()
        self.send(frame)
        try:
            await asyncio.wait([waiting], timeout=seconds)
        finally:
            self._waiting.pop(frame.number, None)
        return waiting.result() if waiting.done() and not waiting.cancelled() else None


class Member:
    """A process's end."""

    def __init__(self, end: socket.socket, families: Callable[[], list[Family]]) -> None:
        self._channel, self._families = _Channel(end), families

    async def run(self) -> None:
        """Say this process's figures when they are asked for. Ends with the parent, or when it is cancelled."""
        await self._channel.listen(self._heard)

    async def _heard(self, frame: _Frame) -> None:
        self._channel.send(_Frame("said", frame.number, self._families()))

    async def scrape(self, open_metrics: bool) -> bytes:
        """The text for all processes. Raises TurnError: part of the figures would be worse than none."""
        reply = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWERS_WITHIN):
                await self._channel.opened.wait()
                reply = await self._channel.ask(_Frame("ask", 0, open_metrics=open_metrics), _ANSWERS_WITHIN)
        if reply is None:
            raise TurnError("overloaded", "the figures of this router's processes could not be gathered in time")
        return reply.text


class Gathering:
    """The parent's side: a thread with a loop of its own."""

    def __init__(self) -> None:
        self._merging = Merging()
        self._channels: dict[str, _Channel] = {}
        self._one_at_a_time = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gathering", daemon=True)
        self._thread.start()

    def admit(self, process: str) -> socket.socket:
        """The end for a process that is about to be started; the caller closes it here."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        asyncio.run_coroutine_threadsafe(self._follow(process, ours), self._loop)
        return theirs

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)

    async def _follow(self, process: str, end: socket.socket) -> None:
        channel = self._channels[process] = _Channel(end)
        try:
            await channel.listen(lambda frame: self._asked(channel, frame))
        except Exception:  # a fault of ours: the operator sees it in the log, and scrapes go on without this process
            log.exception("the figures of process %s are not heard of any more", process)
        finally:
            del self._channels[process]

    async def _asked(self, channel: _Channel, frame: _Frame) -> None:
        asked_at = self._loop.time()
        async with self._one_at_a_time:
            if self._loop.time() - asked_at > _ANSWERS_WITHIN:
                return  # nobody waits for it any more
            channels = {name: channel for name, channel in self._channels.items() if channel.is_heard}
            replies = await asyncio.gather(*(each.ask(_Frame("say", 0), _SAYS_WITHIN) for each in channels.values()))
            said = {name: reply.families for name, reply in zip(channels, replies, strict=True) if reply is not None}
            if not said:
                return  # the asker gives up by itself; of nobody's figures no sum can be made
            merged = self._merging.merge(said, silent=[name for name in self._channels if name not in said])
        channel.send(_Frame("answer", frame.number, text=text(merged, frame.open_metrics)))
