"""Large bodies through a real router process: the same bytes, and memory that does not grow with them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from tests.support.processes import Processes, Replica, metrics, total, wait_until
from tests.support.wire import Wire, ask

MIB = 1 << 20
UPLOADS = 8
SIZE = 25 * MIB
BLOCK = random.Random(11).randbytes(MIB)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture(scope="module")
def replica(module_processes: Processes, listener: socket.socket) -> Replica:
    worker = f"--worker=http://127.0.0.1:{listener.getsockname()[1]},name=w"
    [replica] = module_processes.replicas_with(
        [worker, "--claims=memory://", "--probe-path=off", "--models-interval=0"]
    )
    return replica


async def _at_rest(replica: Replica) -> bool:
    samples = await metrics(replica)
    return not (total(samples, "coatcheck_turns_running") or total(samples, "coatcheck_in_flight"))


async def warm(url: str, method: str = "GET", body: bytes | None = None) -> None:
    """What a process needs once is not these tests' matter."""
    for _ in range(20):
        await ask(url, target="/metrics")
        await ask(url, method, "/v1/warm", body=body)


async def _stalled(count: Callable[[], int]) -> None:
    """Wait until `count` stands still."""
    last = -1
    while count() != last:
        last = count()
        await asyncio.sleep(0.2)


Worker = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def working(worker: Worker, listener: socket.socket) -> AsyncIterator[None]:
    """`worker` is played for each connection, until the block is left: none is open then."""
    open_now: set[asyncio.StreamWriter] = set()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        try:
            await worker(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the router may leave at any time
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            open_now.discard(writer)

    async with await asyncio.start_server(play, sock=listener.dup(), limit=65536):
        yield
    for writer in open_now:
        writer.transport.abort()
    await wait_until(lambda: not open_now, 30)


class Uploads:
    """A worker that reads no body until it is told to, and then in small pieces with pauses."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.received = 0
        self.go_on = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b"/v1/warm" not in head:
                await self.go_on.wait()
            digest = hashlib.sha256()
            if b"transfer-encoding: chunked" in head:
                while size := int((await reader.readline()).split(b";")[0], 16):
                    await self._take(reader, size, digest)
                    await reader.readexactly(2)
                await reader.readexactly(2)
            else:
                await self._take(reader, int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]), digest)
            if b"/v1/warm" not in head:
                self.digests.append(digest.hexdigest())
            writer.write(OK)

    async def _take(self, reader: asyncio.StreamReader, size: int, digest: hashlib._Hash) -> None:
        while size:
            data = await reader.read(min(size, 65536))
            if not data:
                raise asyncio.IncompleteReadError(b"", size)
            digest.update(data)
            size -= len(data)
            before, self.received = self.received, self.received + len(data)
            if before // MIB != self.received // MIB:
                await asyncio.sleep(0.002)


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_uploads_to_a_slow_worker_cost_no_memory(replica: Replica, listener: socket.socket, framing: str) -> None:
    """Eight at once, 25 MiB each, of a kind that the router has no need to read."""
    uploads = Uploads()
    process = replica.process
    sent = 0

    async def upload() -> None:
        nonlocal sent
        async with await Wire.to(replica.url) as wire:
            kind = ("content-type", "multipart/form-data; boundary=b")
            declared = ("content-length", str(SIZE)) if framing == "length" else ("transfer-encoding", "chunked")
            wire.request("POST", "/v1/files", [kind, declared])
            for _ in range(SIZE // MIB):
                wire.write(BLOCK if framing == "length" else b"%x\r\n%b\r\n" % (MIB, BLOCK))
                await wire.drain()
                sent += 1
            if framing == "chunked":
                wire.write(b"0\r\n\r\n")
            assert (await wire.answer()).status == 200

    async with working(uploads, listener):
        await warm(replica.url, "POST", BLOCK[: 200 * 1024])
        before = process.memory()
        process.forget_peak()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(UPLOADS):
                tasks.create_task(upload())
            await _stalled(lambda: sent)
            assert sent < UPLOADS * SIZE // MIB * 3 // 4, "the kernel's buffers have swallowed it all"
            uploads.go_on.set()
        grown = process.memory("VmHWM") - before
        await wait_until(lambda: _at_rest(replica), 30)
    assert uploads.digests == [hashlib.sha256(BLOCK * (SIZE // MIB)).hexdigest()] * UPLOADS
    assert grown < 8 * MIB, f"grown by {grown / MIB:.1f} MiB"


@pytest.mark.parametrize("framing", ["length", "chunked", "one chunk", "close"])
async def test_single_large_event_costs_no_memory(replica: Replica, listener: socket.socket, framing: str) -> None:
    """An event is never collected, however long it is."""
    size = 24 * MIB
    event = b"data: " + (BLOCK.replace(b"\n", b"-").replace(b"\r", b"-") * (size // MIB))[: size - 8] + b"\n\n"
    kind = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    answer = {
        "length": kind + b"content-length: %d\r\n\r\n%b" % (size, event),
        "chunked": kind
        + b"transfer-encoding: chunked\r\n\r\n"
        + b"".join(b"ffff\r\n%b\r\n" % event[at : at + 65535] for at in range(0, size - size % 65535, 65535))
        + b"%x\r\n%b\r\n0\r\n\r\n" % (size % 65535, event[size - size % 65535 :]),
        "one chunk": kind + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (size, event),
        "close": kind + b"\r\n" + event,
    }[framing]

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/v1/warm" in head:
                writer.write(OK)
                continue
            writer.write(answer)
            await writer.drain()
            if framing == "close":
                break

    process = replica.process
    async with working(work, listener):
        await warm(replica.url)
        before = process.memory()
        process.forget_peak()
        digest = hashlib.sha256()
        async with await Wire.to(replica.url) as wire:
            wire.request("GET", "/v1/x")
            assert (await wire.head()).status == 200
            while piece := await wire.read():
                digest.update(piece)
        grown = process.memory("VmHWM") - before
        await wait_until(lambda: _at_rest(replica), 30)
    assert digest.digest() == hashlib.sha256(event).digest()
    assert grown < 8 * MIB, f"grown by {grown / MIB:.1f} MiB"
