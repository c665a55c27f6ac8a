"""Things that behave as no real one can be made to: a clock without waiting, and a claim store that fails on cue.

Real stores and real time come in `tests/stores` and `tests/e2e`. Here a test says *when* a reply is lost or a watch
dies, and days pass at once; that is what these exist for. They speak the store's contract, and replace no code of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import selectors
import socket
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from backends.base import (
    Claim,
    ClaimOutcome,
    ClaimStore,
    ClaimValue,
    CloseOutcome,
    Deleted,
    Event,
    OutcomeUnknown,
    Reset,
    StoreUnavailable,
)

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when nothing is ready, so that timeouts of minutes cost nothing and a
    test's order of events never depends on the machine. Has no sockets of its own to wait for: a test that would
    wait for ever raises instead."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everything waits and no timer is set: this would hang for ever")
        if timeout > 0:
            self._loop.now += timeout
        return []


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test in a VirtualTimeLoop. What the loop would have logged fails the test."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        faults: list[dict[str, Any]] = []
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.get_loop().set_exception_handler(lambda _, context: faults.append(context))
            runner.run(test(*args, **kwargs))
        assert not faults

    return run


async def settle() -> None:
    """Let everything run that can run now; no time passes in a VirtualTimeLoop."""
    for _ in range(30):
        await asyncio.sleep(0)


Fault = Exception | type[Exception]


class Undone(OutcomeUnknown):
    """An unknown outcome that was in truth "not done"; a plain OutcomeUnknown was done."""


class ScriptedStore:
    """A claim store in front of a real one, whose calls and events a test decides. Two of them over one store are two
    replicas' ways to it.

    Like etcd it gives no stamps, unless `stamps`, so that only events and re-reads can tell of a delete.
    """

    def __init__(self, inner: ClaimStore, *, stamps: bool = False) -> None:
        self._inner = inner
        self._stamps = stamps
        self.calls: Counter[str] = Counter()
        """By operation, those that failed too."""
        self.broken: dict[str, Fault] = {}
        """Operations that fail until they are taken out; `all` for all."""
        self.next_faults: dict[str, deque[Fault | None]] = {}
        """What the next calls of an operation meet: an exception before it is done, or None for nothing."""
        self.lost_replies: Counter[str] = Counter()
        """How many of the next calls of an operation are done and answered with OutcomeUnknown."""
        self.before: dict[str, asyncio.Event] = {}
        """Operations that wait for this before they are done."""
        self.after: dict[str, asyncio.Event] = {}
        """Operations that wait for this after they are done, before they answer."""
        self.jitter: Callable[[], float] | None = None
        """Seconds that each call takes."""
        self.chance: Callable[[str], Fault | None] | None = None
        """Asked once per call and after it was done: a fault by chance."""
        self.deaf = False
        """Deletes are not reported."""
        self.watch_fault: Fault | None = None
        """What `subscribe` raises."""
        self._mailboxes: set[asyncio.Queue[Event | Exception]] = set()

    @property
    def across_processes(self) -> bool:
        return self._inner.across_processes

    # -- the contract

    async def create_or_get(self, key: str, proposal: ClaimValue, ttl: float) -> ClaimOutcome:
        return await self._call("create", lambda: self._inner.create_or_get(key, proposal, ttl))

    async def get(self, key: str) -> Claim | None:
        return await self._call("get", lambda: self._inner.get(key))

    async def renew(self, claim: Claim, ttl: float) -> Claim:
        return await self._call("renew", lambda: self._inner.renew(claim, ttl))

    async def close(self, claim: Claim) -> CloseOutcome:
        return await self._call("close", lambda: self._inner.close(claim))

    async def check(self) -> None:
        await self._call("check", self._inner.check)

    async def subscribe(self) -> AsyncIterator[Event]:
        if self.watch_fault is not None:
            raise self.watch_fault
        mailbox: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._mailboxes.add(mailbox)
        pump = asyncio.create_task(self._pump(mailbox))
        try:
            while True:
                event = await mailbox.get()
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self._mailboxes.discard(mailbox)
            pump.cancel()

    def stamp(self, key: str) -> int:
        return self._inner.stamp(key) if self._stamps else 0

    async def aclose(self) -> None:
        await self._inner.aclose()

    # -- the script

    def go_away(self) -> None:
        """No call is answered any more, and the watch dies."""
        self.broken["all"] = StoreUnavailable
        self.watch_fault = StoreUnavailable("the watch was refused")
        self.drop_watch()

    def return_(self) -> None:
        self.broken.clear()
        self.watch_fault = None

    def drop_watch(self) -> None:
        self.emit(StoreUnavailable("the watch was lost"))

    def emit(self, event: Event | Exception) -> None:
        for mailbox in self._mailboxes:
            mailbox.put_nowait(event)

    async def _pump(self, mailbox: asyncio.Queue[Event | Exception]) -> None:
        async for event in self._inner.subscribe():
            if isinstance(event, Reset) or not self.deaf:
                mailbox.put_nowait(event)

    async def _call(self, op: str, call: Callable[[], Awaitable[T]]) -> T:
        self.calls[op] += 1
        if self.jitter is not None:
            await asyncio.sleep(self.jitter())
        if op in self.before:
            await self.before[op].wait()
        faults = self.next_faults.get(op)
        fault = faults.popleft() if faults else self.broken.get(op, self.broken.get("all"))
        if fault is None and self.chance is not None:
            fault = self.chance(op)
        done = fault is None or fault is OutcomeUnknown or type(fault) is OutcomeUnknown
        if not done:
            raise fault
        answer = await call()
        if op in self.after:
            await self.after[op].wait()
        if self.jitter is not None:
            await asyncio.sleep(self.jitter())
        if fault is not None:
            raise fault
        if self.lost_replies[op] > 0:
            self.lost_replies[op] -= 1
            raise OutcomeUnknown("the reply was lost")
        return answer


def deleted(claim: Claim) -> Deleted:
    """As a store with ordered revisions says that this claim is gone."""
    return Deleted(claim.key, before=claim.revision + 1)


class Peer:
    """The worker's end of one connection, byte by byte."""

    def __init__(self, worker: ByteWorker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._worker, self._reader, self._writer = worker, reader, writer

    async def request(self) -> tuple[bytes, bytes]:
        """The next request's head and body. Raises ConnectionError when there is none."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            body = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as end:
            raise ConnectionError("the router closed the connection") from end
        self._worker.requests.append((head, body))
        return head, body

    async def head(self) -> bytes:
        """The next request's head alone; its body is left unread."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        self._worker.requests.append((head, b""))
        return head

    async def send(self, *pieces: bytes) -> None:
        """Each piece in a segment of its own, as far as the kernel lets us."""
        for piece in pieces:
            if self._writer.is_closing():
                raise ConnectionError("the router has cut the connection")  # uvloop's own word for it is another
            self._writer.write(piece)
            await self._writer.drain()
            if len(pieces) > 1:
                await asyncio.sleep(0.002)

    async def gone(self) -> None:
        """Wait until the router has closed or cut the connection."""
        try:
            while await self._reader.read(65536):
                pass
        except ConnectionError:
            pass

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """As a process that was killed."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


class ByteWorker:
    """A worker on a loopback socket that does exactly what its script says, once per connection: odd framing, silence,
    a close at a given byte. Well-behaved workers cannot show how the router takes what is wrong on the wire.

    `scripts`: for the first connections in turn; the last one for all others. A connection is closed when its script
    ends.
    """

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults: list[BaseException] = []

    async def __aenter__(self) -> ByteWorker:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        if kind is None and self._faults:
            raise self._faults[0]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        script = self.scripts[min(self.connections, len(self.scripts) - 1)]
        self.connections += 1
        try:
            await script(Peer(self, reader, writer))
        except (ConnectionError, asyncio.CancelledError):
            pass  # the router may leave at any time, and so may the test
        except BaseException as fault:
            self._faults.append(fault)
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def answers(response: bytes, *more: bytes) -> Script:
    """The same bytes to every request, on connections that stay."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(response, *more)

    return script


class AsgiClient:
    """An ASGI server's side of one request, with exact messages: it takes what is sent, stalls, leaves or fails when
    told to. Real servers do these things only by chance."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        *,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        query: bytes = b"",
        headers: list[tuple[bytes, bytes]] | None = None,
        body: bytes | list[bytes] = b"{}",
        ends: bool = True,
    ) -> None:
        """`body`: one message or several; without `ends` more would follow, which never comes."""
        pieces = body if isinstance(body, list) else [body]
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": [(b"host", b"router")] + (headers or []),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        last = len(pieces) - 1
        self._messages: deque[dict[str, Any]] = deque(
            {"type": "http.request", "body": piece, "more_body": number < last or not ends}
            for number, piece in enumerate(pieces)
        )
        self._app = app
        self._news = asyncio.Event()
        self.left = False
        self.sent: list[dict[str, Any]] = []
        self.stalled = 0
        """Calls of `send` that wait."""
        self._room = asyncio.Event()
        self._room.set()
        self.on_send: Callable[[dict[str, Any]], Awaitable[None]] | None = None
        """Awaited with each message before it is taken; may raise."""
        self.receive_fault: Exception | None = None
        self.task: asyncio.Task[None] | None = None

    def start(self) -> AsgiClient:
        self.task = asyncio.create_task(self._run())
        return self

    async def _run(self) -> None:
        await self._app(self.scope, self.receive, self.send)

    async def finish(self) -> AsgiClient:
        """Until the application has returned."""
        if self.task is None:
            self.start()
        assert self.task is not None
        async with asyncio.timeout(30):
            await self.task
        return self

    def leave(self) -> None:
        """What a server does then: `receive` answers, and `send` never waits and does nothing any more."""
        self.left = True
        self._news.set()
        self._room.set()

    def stall(self) -> None:
        """From now on `send` waits."""
        self._room.clear()

    def resume(self) -> None:
        self._room.set()

    async def receive(self) -> dict[str, Any]:
        if self.receive_fault is not None:
            raise self.receive_fault
        if self._messages:
            return self._messages.popleft()
        if not self.left and not self.complete:
            await self._news.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if not self._room.is_set():
            self.stalled += 1
            await self._room.wait()
            self.stalled -= 1
        if self.left:
            return
        if self.on_send is not None:
            await self.on_send(message)
        assert not self.complete, "a message after the end"
        assert (message["type"] == "http.response.start") is (not self.sent), "start exactly once, and first"
        self.sent.append(dict(message))
        if self.complete:
            self._news.set()

    # -- what was sent

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        pairs = self.sent[0]["headers"]
        assert len(dict(pairs)) == len(pairs), "a header twice"
        return dict(pairs)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def complete(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)


async def until(condition: Callable[[], object]) -> None:
    """Poll for what another task or the kernel brings about."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)
