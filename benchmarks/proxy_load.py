"""The clients of `benchmarks.proxy`, in a process of their own, `python -m benchmarks.proxy_load`: it reads a `Load` as
a line of JSON, and prints its `Outcome` as one; then the next.

The CPU time of the measured processes is read at both ends of the same window in which units are counted. What the
clients and the workers used of a core is in the outcome too: a figure from a window in which they had none left says
nothing about the proxy.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import httptools
import msgspec
import uvloop

from benchmarks import procfs
from benchmarks.proxy_worker import STAMP

WARM_SESSIONS = 64
PROBE_CONNECTIONS = 8
START_LIMIT_S = 30.0
OVERALL_LIMIT_S = 60.0
"""Beyond the window."""
SATURATED = 0.9
"""Cores; more than this and a proxy of one thread has no more."""
OPENING = 50
"""Connections that are opened at once."""
SETTLE_S = 0.4
REQUESTS_SETTLE_S = 0.15
MOST_CONNECTIONS = 1000
ENDLESS = 1_000_000
PROMPT_LINE = 'def hook(coat):\n    return "ticket for " + coat  # one line of the prompt\n'
"""With what JSON has to escape, as prompts of code are."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What to send."""

    kind: str
    """`requests`: each connection sends its next request when it has the answer to the last one. `streams`: they run
    throughout, paced by the workers. `arrivals`: requests begin at `rate`, whether or not others have been answered."""
    ports: Sequence[int]
    """Of the proxy; without one, of the workers."""
    proxy: Sequence[int] = ()
    """Process ids."""
    workers: Sequence[int] = ()
    session_header: str = "x-dynamo-session-id"
    sessions: str = "none"
    """`none`; `warm`: the same few in turn; `cold`: each request begins another one."""
    connections: int = 16
    """For streams: how many of them."""
    seconds: float = 2.0
    rate: float = 0.0
    """Of chunks, of all streams together; of arrivals; for `requests` at most this, 0: as they come."""
    probes: Sequence[str] = ()
    """Kinds of sessions for which, with the streams running, the time to the first chunk of another one is measured."""
    probe_seconds: float = 1.0
    probe_rate: float = 100.0
    body_bytes: int = 1200


class Outcome(msgspec.Struct, kw_only=True):
    """What came of it."""

    units: int = 0
    """Answers, or chunks."""
    seconds: float = 0.0
    cpu_s: float = 0.0
    """Of the proxy, in the window."""
    resident: int = 0
    latency_us: tuple[float, float] = (0.0, 0.0)
    """p50 and p99: of a chunk from worker to client; of a whole answer; for arrivals from when it was due."""
    ttft_us: dict[str, tuple[float, float]] = {}
    """p50 and p99 by kind of sessions."""
    clients_busy: float = 0.0
    """Part of a core."""
    workers_busy: float = 0.0
    """Part of a core, of the busier one."""
    others_busy: float = 0.0
    """Cores that were used by nobody of ours."""
    idle: float = 0.0
    """Part of the machine."""
    given_up: int = 0
    """Arrivals that were not sent, as `MOST_CONNECTIONS` others had no answer."""
    errors: int = 0
    error: str = ""
    """The first one."""


class Requests:
    """Request bytes, one after the other."""

    def __init__(self, load: Load, sessions: str, *, stream: bool = False, chunks: int = 1, pause_us: int = 0) -> None:
        self._body = request_body(load.body_bytes, stream=stream, chunks=chunks, pause_us=pause_us)
        self._header = load.session_header
        self._ids: Iterator[str] | None = None
        nonce = os.urandom(4).hex()
        if sessions == "warm":
            self._ids = itertools.cycle([f"warm-{number:04d}" for number in range(WARM_SESSIONS)])
        elif sessions == "cold":
            self._ids = (f"{nonce}-{number:08d}" for number in itertools.count())

    def next(self, port: int) -> bytes:
        session = f"{self._header}: {next(self._ids)}\r\n" if self._ids else ""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer none\r\n"
            f"content-type: application/json\r\n{session}content-length: {len(self._body)}\r\n\r\n"
        )
        return head.encode() + self._body


def request_body(prompt: int, *, stream: bool = False, chunks: int = 1, pause_us: int = 0) -> bytes:
    """With so many characters of prompt."""
    fields: dict[str, Any] = {"model": "m"}
    if stream:
        fields |= {"stream": True, "max_tokens": chunks, "seed": pause_us}
    content = (PROMPT_LINE * (prompt // len(PROMPT_LINE) + 1))[:prompt]
    fields["messages"] = [{"role": "user", "content": content}]
    return json.dumps(fields, separators=(",", ":")).encode()


# --- one connection --------------------------------------------------------------------------------------------------


class Errors:
    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def add(self, text: str) -> None:
        self.count += 1
        self.first = self.first or text


class Exchange(asyncio.Protocol):
    """One request at a time; `done` is called with what became of it."""

    def __init__(self, errors: Errors) -> None:
        self.errors = errors
        self.transport: asyncio.Transport | None = None
        self.began_ns = self.first_ns = 0
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[bool] | None = None
        self._head = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def send(self, request: bytes) -> asyncio.Future[bool]:
        """Resolves to whether it was answered 200, whole."""
        assert self.transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._head, self.first_ns = b"", 0
        self.began_ns = time.monotonic_ns()
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        if not self.first_ns and STAMP.search(data):
            self.first_ns = time.monotonic_ns()
        if not self._head:
            self._head = data[:400]
        if self._parser is not None:
            self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        good = self._parser is not None and self._parser.get_status_code() == 200
        if not good:
            self.errors.add(self._head.decode(errors="replace"))
        if self._done is not None and not self._done.done():
            self._done.set_result(good)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self.errors.add(f"connection lost: {error}")
            self._done.set_result(False)

    @property
    def closed(self) -> bool:
        return self.transport is None or self.transport.is_closing()


class Line:
    """A connection to a port, opened when it is needed and again when the other side has closed it."""

    def __init__(self, port: int, errors: Errors) -> None:
        self.port = port
        self._errors = errors
        self._exchange: Exchange | None = None

    async def open(self) -> Exchange:
        if self._exchange is None or self._exchange.closed:
            _, self._exchange = await asyncio.get_running_loop().create_connection(
                lambda: Exchange(self._errors), "127.0.0.1", self.port
            )
        return self._exchange

    async def ask(self, request: bytes) -> Exchange | None:
        """What came of it, if it was answered 200, whole."""
        exchange = await self.open()
        return exchange if await exchange.send(request) else None

    def close(self) -> None:
        if self._exchange is not None and self._exchange.transport is not None:
            self._exchange.transport.close()


class Stream(asyncio.Protocol):
    """One long answer. As little as can be is done for a chunk."""

    def __init__(self, request: bytes, meter: ChunkMeter) -> None:
        self._request = request
        self._meter = meter
        self._answered = self._begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        stamps = STAMP.findall(data)
        if stamps:
            meter = self._meter
            meter.chunks += len(stamps)
            if meter.noting:
                now = time.monotonic_ns()
                for stamp in stamps:
                    meter.taken_ns.append(now - int(stamp))
        if not self._answered:
            self._answered = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._meter.errors.add(data[:400].decode(errors="replace"))
        if not self._begun and stamps:
            self._begun = True
            self._meter.begun += 1

    def connection_lost(self, error: Exception | None) -> None:
        if not self._meter.closing:
            self._meter.errors.add(f"stream lost: {error}")


class ChunkMeter:
    def __init__(self, errors: Errors) -> None:
        self.errors = errors
        self.chunks = self.begun = 0
        self.taken_ns: list[int] = []
        self.noting = self.closing = False


# --- the three kinds of load -----------------------------------------------------------------------------------------


class Clients:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.errors = Errors()
        self.outcome = Outcome()
        self._ports = itertools.cycle(load.ports)

    async def run(self) -> Outcome:
        kinds = {"requests": self.requests, "streams": self.streams, "arrivals": self.arrivals}
        try:
            async with asyncio.timeout(self.load.seconds + OVERALL_LIMIT_S):
                await kinds[self.load.kind]()
        except TimeoutError:
            self.errors.add(f"not done after {self.load.seconds + OVERALL_LIMIT_S:.0f} s")
        except OSError as error:
            self.errors.add(str(error))
        self.outcome.errors, self.outcome.error = self.errors.count, self.errors.first
        return self.outcome

    async def requests(self) -> None:
        load = self.load
        requests = Requests(load, load.sessions)
        taken_ns: list[int] = []
        ending = False

        async def client(number: int) -> None:
            line = self._line()
            due = time.monotonic() + number / load.rate if load.rate else 0.0
            while not ending:
                if load.rate:
                    await asyncio.sleep(due - time.monotonic())
                    due = max(due + load.connections / load.rate, time.monotonic())
                exchange = await line.ask(requests.next(line.port))
                if exchange is not None:
                    taken_ns.append(time.monotonic_ns() - exchange.began_ns)
                elif self.errors.count > load.connections:
                    break
            line.close()

        async with asyncio.TaskGroup() as group:
            for number in range(load.connections):
                group.create_task(client(number))
            await asyncio.sleep(min(REQUESTS_SETTLE_S, load.seconds))
            window = Window(load)
            before = len(taken_ns)
            await asyncio.sleep(load.seconds)
            self.outcome.units = len(taken_ns) - before
            window.close(self.outcome)
            ending = True
        self.outcome.latency_us = spread_us(taken_ns[before : before + self.outcome.units])

    async def streams(self) -> None:
        load, loop = self.load, asyncio.get_running_loop()
        pause_us = int(load.connections / load.rate * 1e6)
        requests = Requests(load, load.sessions, stream=True, chunks=ENDLESS, pause_us=pause_us)
        meter = ChunkMeter(self.errors)
        streams: list[Stream] = []
        while len(streams) < load.connections:
            ports = list(itertools.islice(self._ports, min(OPENING, load.connections - len(streams))))
            opened = [Stream(requests.next(port), meter) for port in ports]
            await asyncio.gather(
                *(
                    loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
                    for port, stream in zip(ports, opened, strict=True)
                )
            )
            streams += opened
        give_up_at = time.monotonic() + START_LIMIT_S
        while meter.begun < load.connections:
            if time.monotonic() > give_up_at:
                self.errors.add(f"{load.connections - meter.begun} streams did not begin in {START_LIMIT_S:.0f} s")
                break
            await asyncio.sleep(0.02)
        # Every stream has had a pause of its own length, so that all are out of step.
        await asyncio.sleep(max(min(SETTLE_S, load.seconds), pause_us / 1e6))
        window = Window(load)
        before, meter.noting = meter.chunks, True
        await asyncio.sleep(load.seconds)
        self.outcome.units, meter.noting = meter.chunks - before, False
        window.close(self.outcome)
        self.outcome.latency_us = spread_us(meter.taken_ns)
        # Where chunks queue, a request would wait for so long that the probes would never end.
        for sessions in load.probes if self.outcome.cpu_s < SATURATED * self.outcome.seconds else ():
            self.outcome.ttft_us[sessions] = await self._probe(sessions)
        meter.closing = True
        for stream in streams:
            stream.transport.abort()
        await asyncio.sleep(0)

    async def _probe(self, sessions: str) -> tuple[float, float]:
        """Short streams at a steady pace on kept connections, each from its sending to its first chunk."""
        load = self.load
        requests = Requests(load, sessions, stream=True)
        lines = [self._line() for _ in range(PROBE_CONNECTIONS)]
        taken_ns: list[int] = []

        async def client(number: int, line: Line) -> None:
            due = begin + number / load.probe_rate
            while due < begin + load.probe_seconds:
                await asyncio.sleep(due - time.monotonic())
                exchange = await line.ask(requests.next(line.port))
                if exchange is not None:
                    taken_ns.append(exchange.first_ns - exchange.began_ns)
                due += PROBE_CONNECTIONS / load.probe_rate
            line.close()

        # A first one on each, so that no connection is being opened and each warm session is known.
        for index in range(WARM_SESSIONS if sessions == "warm" else PROBE_CONNECTIONS):
            line = lines[index % PROBE_CONNECTIONS]
            await line.ask(requests.next(line.port))
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, line in enumerate(lines):
                group.create_task(client(number, line))
        return spread_us(taken_ns)

    async def arrivals(self) -> None:
        load = self.load
        requests = Requests(load, load.sessions)
        idle: deque[Line] = deque()
        taken_ns: list[int] = []
        running: set[asyncio.Task[None]] = set()
        connections = 0

        async def turn(due: float) -> None:
            nonlocal connections
            if idle:
                line = idle.pop()
            elif connections < MOST_CONNECTIONS:
                connections += 1
                line = self._line()
            else:
                self.outcome.given_up += 1
                return
            if await line.ask(requests.next(line.port)) is not None:
                taken_ns.append(int((time.monotonic() - due) * 1e9))
            idle.append(line)

        for _ in range(load.connections):
            connections += 1
            idle.append(self._line())
            await idle[-1].open()
        window = Window(load)
        begin = time.monotonic()
        for number in range(int(load.rate * load.seconds)):
            due = begin + number / load.rate
            wait = due - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            task = asyncio.create_task(turn(due))
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running, timeout=START_LIMIT_S)
        self.outcome.units = len(taken_ns)
        window.close(self.outcome)
        self.outcome.latency_us = spread_us(taken_ns)
        for line in idle:
            line.close()

    def _line(self) -> Line:
        return Line(next(self._ports), self.errors)


class Window:
    """The time between its making and `close`, and who used the cores in it."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._machine, self._clients = procfs.machine(), time.process_time()
        self._workers = [procfs.cpu([pid]) for pid in load.workers]
        self._began = time.monotonic()
        self._proxy = procfs.cpu(load.proxy)

    def close(self, outcome: Outcome) -> None:
        outcome.cpu_s = procfs.cpu(self._load.proxy).since(self._proxy)
        outcome.seconds = seconds = time.monotonic() - self._began
        outcome.resident = procfs.resident(self._load.proxy)
        clients = time.process_time() - self._clients
        workers = [
            procfs.cpu([pid]).since(before) for pid, before in zip(self._load.workers, self._workers, strict=True)
        ]
        machine = procfs.machine()
        busy, idle = machine.busy_s - self._machine.busy_s, machine.idle_s - self._machine.idle_s
        outcome.clients_busy = clients / seconds
        outcome.workers_busy = max(workers, default=0.0) / seconds
        outcome.others_busy = max(0.0, busy - clients - sum(workers) - outcome.cpu_s) / seconds
        outcome.idle = idle / (busy + idle) if busy + idle else 0.0


def spread_us(taken_ns: list[int]) -> tuple[float, float]:
    """p50 and p99."""
    if not taken_ns:
        return 0.0, 0.0
    taken_ns.sort()
    return taken_ns[len(taken_ns) // 2] / 1e3, taken_ns[int(len(taken_ns) * 0.99)] / 1e3


def main() -> None:
    gc.disable()  # its pauses would be the proxy's latency
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            load = msgspec.json.decode(line, type=Load)
            outcome = runner.run(Clients(load).run())
            print(msgspec.json.encode(outcome).decode(), flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
