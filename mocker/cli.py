"""Mock workers from the command line: `python -m mocker`, and the same options mounted in another parser."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import fields, replace
from typing import Any, get_args

import msgspec
import uvicorn
import uvloop

from mocker.engine.profile import Profile, load, names, resized
from mocker.faults import Fault
from mocker.server import MockWorker, create_mock
from mocker.settings import HandoverKind, KvEvents, KvTransfer, MockSettings, Phase

STOP_GRACE = 0.5
"""Seconds that running turns get to end by themselves when the workers stop."""

_TRANSFER = KvTransfer()
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(MockSettings)}


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mocker`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mocker", description="Simulated LLM workers with an OpenAI API.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `run` takes."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=_integer(0, 65535), default=9001, help="first port; 0: any free one (default: %(default)s)"
    )
    parser.add_argument(
        "--count", type=_integer(1, 1000), default=1, help="workers, on consecutive ports (default: %(default)s)"
    )
    parser.add_argument("--name", type=_text, help="the worker's name (default: mock-PORT; with --count: NAME-PORT)")
    parser.add_argument(
        "--model", action="append", type=_text, help="a model to serve; repeatable (default: mock-model)"
    )
    parser.add_argument(
        "--ttft-ms", type=_milliseconds, default=_DEFAULTS["ttft_ms"], help="time to first token (default: %(default)s)"
    )
    parser.add_argument(
        "--itl-ms", type=_milliseconds, default=_DEFAULTS["itl_ms"], help="inter-token latency (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=_integer(1, 1_000_000),
        default=_DEFAULTS["tokens"],
        help="completion length when the request sets none (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=_DEFAULTS["seed"], help="of the text (default: %(default)s)")
    parser.add_argument(
        "--dp-size", type=_integer(1), default=_DEFAULTS["dp_size"], help="data-parallel ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--history",
        type=_integer(1),
        default=_DEFAULTS["history"],
        help="turns remembered for /mock/turns (default: %(default)s)",
    )
    parser.add_argument(
        "--cache-sessions",
        type=_integer(1),
        default=_DEFAULTS["cache_sessions"],
        help="sessions in the simulated KV cache (default: %(default)s)",
    )
    parser.add_argument("--api-key", type=_text, help="ask for this bearer token on /v1/*")
    parser.add_argument(
        "--fault",
        action="append",
        type=_fault,
        default=[],
        help="order this at start (see /mock/faults); repeatable",
    )
    _add_engine(parser)
    _add_phase(parser)


def _add_phase(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("phases")
    group.add_argument(
        "--phase",
        choices=get_args(Phase),
        default=_DEFAULTS["phase"],
        help="of a turn; for one it hands blocks over, or takes them (default: %(default)s)",
    )
    group.add_argument(
        "--handover",
        choices=get_args(HandoverKind),
        default=_TRANSFER.handover,
        help="as vLLM's NIXL connector, or as SGLang does it (default: %(default)s)",
    )
    group.add_argument(
        "--bootstrap-port",
        type=_integer(0, 65535),
        default=8998,
        help="where an SGLang that prefills is met, the next worker at the next; 0: any (default: %(default)s)",
    )
    group.add_argument(
        "--kv-lease-s",
        type=_seconds,
        default=_TRANSFER.lease_s,
        help="keep what nobody fetches, or wait for another worker (default: %(default)s)",
    )
    group.add_argument(
        "--kv-gb-s", type=_seconds, default=_TRANSFER.gb_s, help="10^9 bytes a second to another (default: %(default)s)"
    )
    group.add_argument(
        "--kv-recompute", action="store_true", help="compute anew what cannot be fetched, which fails by default"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the engine")
    group.add_argument(
        "--profile",
        type=_text,
        default="flat",
        help=f"what is simulated: {', '.join(names())}, a path of a .toml file, or flat, which is --ttft-ms and "
        "--itl-ms without an engine (default: %(default)s)",
    )
    group.add_argument("--block-size", type=_integer(1, 4096), help="tokens of a block (default: the profile's)")
    group.add_argument("--kv-blocks", type=_integer(1), help="blocks of each rank (default: the profile's)")
    group.add_argument("--max-queued", type=_integer(0), help="answers 503 beyond so many requests (0: any number)")
    group.add_argument(
        "--startup-s", type=_seconds, help="loads its model for so long, and answers 503 (default: the profile's)"
    )
    group.add_argument(
        "--speed", type=_seconds, default=_DEFAULTS["speed"], help="how much faster time passes (default: %(default)s)"
    )
    group.add_argument(
        "--kv-events-port",
        type=_integer(0, 65535),
        help="publish KV events as vLLM does: rank n at this port plus n, the next worker after those; 0: any",
    )
    group.add_argument(
        "--kv-replay-port", type=_integer(0, 65535), help="answer there who has missed some, in the same way"
    )
    group.add_argument("--kv-events-topic", default="", help="of the events (default: none)")
    group.add_argument("--kv-events-old", action="store_true", help="events are arrays, as before vLLM 0.24")


Beside = Callable[[Sequence[tuple[MockWorker, str]]], AbstractAsyncContextManager[None]]
"""What else runs while the workers serve, each with its URL; it has ended before they stop."""


def run(args: argparse.Namespace, beside: Beside = lambda workers: contextlib.nullcontext()) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code: 0 stopped, 1 cannot listen, 2 the options do not fit."""
    if args.port and args.port + args.count - 1 > 65535:
        return _fail(2, f"--port {args.port} --count {args.count}: the last port would be above 65535")
    with contextlib.ExitStack() as stack:
        workers = []
        for index in range(args.count):
            port = args.port + index if args.port else 0
            try:
                listener = stack.enter_context(contextlib.closing(listen(args.host, port)))
            except OSError as error:
                return _fail(1, f"cannot listen on {args.host}:{port}: {error.strerror or error}")
            try:
                worker = create_mock(_settings(args, listener.getsockname()[1], index))
            except ValueError as error:
                return _fail(2, str(error))
            except OSError as error:
                return _fail(1, f"cannot listen: {error.strerror or error}")
            workers.append((worker, listener))
            stack.callback(worker.close)
        _raise_file_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_until_signal(workers, beside))
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A bound socket for `serve`. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=2048)


async def serve(workers: Sequence[tuple[MockWorker, socket.socket]], stop: asyncio.Event) -> None:
    """Serve each worker on its bound socket until `stop` is set; then end within 2 s, with open streams too.

    Takes no signals. Turns that do not end within `STOP_GRACE` have their connections reset. Closes the sockets.
    """
    servers = [_Server(worker, listener) for worker, listener in workers]
    async with asyncio.TaskGroup() as group:
        serving = [group.create_task(server.serve(sockets=[server.listener])) for server in servers]
        await stop.wait()
        for server in servers:
            server.should_exit = True
        await asyncio.wait(serving, timeout=STOP_GRACE)
        for server in servers:
            server.worker.reset_running_turns()


class _Server(uvicorn.Server):
    def __init__(self, worker: MockWorker, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                worker,
                http="httptools",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self.worker = worker
        self.listener = listener
        self._refusing: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.worker.started(self.refuse)
        settings = self.worker.settings
        print(f"{settings.name} serves {', '.join(settings.models)} at {_url(self.listener)}", flush=True)

    def refuse(self, seconds: float) -> None:
        """New connections for so long."""
        if self._refusing is None or self._refusing.done():
            host, port = self.listener.getsockname()[:2]
            for server in self.servers:
                server.close()
            self.listener.close()
            self._refusing = asyncio.create_task(self.listen_again(host, port, seconds))

    async def listen_again(self, host: str, port: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.listener = listen(host, port)
        await super().startup([self.listener])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._refusing is not None:
            self._refusing.cancel()
        await super().shutdown([*(sockets or ()), self.listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are for all servers of the process, so not for uvicorn.
        yield


async def _serve_until_signal(workers: Sequence[tuple[MockWorker, socket.socket]], beside: Beside) -> None:
    told, stop = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    serving = asyncio.create_task(serve(workers, stop))
    try:
        async with beside([(worker, _url(listener)) for worker, listener in workers]):
            waiting = asyncio.create_task(told.wait())
            await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
    finally:
        stop.set()
        await serving


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _settings(args: argparse.Namespace, port: int, index: int) -> MockSettings:
    """Of the worker with that index. Raises ValueError."""
    name = f"mock-{port}"
    if args.name is not None:
        name = args.name if args.count == 1 else f"{args.name}-{port}"
    return MockSettings(
        name=name,
        models=tuple(args.model or _DEFAULTS["models"]),
        ttft_ms=args.ttft_ms,
        itl_ms=args.itl_ms,
        seed=args.seed,
        dp_size=args.dp_size,
        tokens=args.tokens,
        history=args.history,
        cache_sessions=args.cache_sessions,
        api_key=args.api_key,
        profile=_profile(args),
        speed=args.speed,
        startup_s=args.startup_s,
        kv_events=_kv_events(args, index),
        phase=args.phase,
        transfer=_transfer(args, index),
        faults=tuple(args.fault),
    )


def _transfer(args: argparse.Namespace, index: int) -> KvTransfer:
    """Raises ValueError."""
    port = 0
    if args.phase == "prefill" and args.handover == "sglang" and args.bootstrap_port:
        port = args.bootstrap_port + index
        if port > 65535:
            raise ValueError(f"--bootstrap-port {args.bootstrap_port}: the last one would be above 65535")
    return KvTransfer(
        handover=args.handover,
        host=args.host,
        port=port,
        lease_s=args.kv_lease_s,
        gb_s=args.kv_gb_s,
        recompute=args.kv_recompute,
    )


def _profile(args: argparse.Namespace) -> Profile | None:
    if args.profile == "flat":
        for flag, value in (
            ("--block-size", args.block_size),
            ("--kv-blocks", args.kv_blocks),
            ("--max-queued", args.max_queued),
        ):
            if value is not None:
                raise ValueError(f"{flag} needs a --profile: without one there is no engine")
        return None
    profile = resized(load(args.profile), blocks=args.kv_blocks, block_size=args.block_size)
    return profile if args.max_queued is None else replace(profile, max_queued=args.max_queued)


def _kv_events(args: argparse.Namespace, index: int) -> KvEvents | None:
    if args.kv_events_port is None:
        if args.kv_replay_port is not None:
            raise ValueError("--kv-replay-port needs a --kv-events-port")
        return None
    before = index * args.dp_size
    for port in (args.kv_events_port, args.kv_replay_port or 0):
        if port + before + args.dp_size - 1 > 65535:
            raise ValueError(f"ports for KV events from {port} on: the last one would be above 65535")
    return KvEvents(
        host=args.host,
        port=args.kv_events_port and args.kv_events_port + before,
        replay_port=args.kv_replay_port and args.kv_replay_port + before,
        topic=args.kv_events_topic,
        old=args.kv_events_old,
    )


def _raise_file_limit() -> None:
    """Thousands of clients need as many file descriptors; the usual soft limit is 1024. Holds for the whole process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _fail(code: int, message: str) -> int:
    print(f"mock: error: {message}", file=sys.stderr)
    return code


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
    wanted = f"{least} or more" if most is None else f"{least} to {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"must be a whole number, {wanted}, not {text!r}")
        return number

    return parse


def _milliseconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"must be a number of milliseconds, 0 or more, not {text!r}")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"must be a number, 0 or more, not {text!r}")
    return number


def _fault(text: str) -> Fault:
    try:
        return msgspec.json.decode(text, type=Fault)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text
