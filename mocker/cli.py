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
from dataclasses import fields
from typing import Any

import uvicorn
import uvloop

from mocker.server import MockWorker, create_mock
from mocker.settings import MockSettings

STOP_GRACE = 0.5
"""Seconds that running turns get to end by themselves when the workers stop."""

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
                workers.append((create_mock(_settings(args, listener.getsockname()[1])), listener))
            except ValueError as error:
                return _fail(2, str(error))
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        settings = self.worker.settings
        print(f"{settings.name} serves {', '.join(settings.models)} at {_url(self.listener)}", flush=True)

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


def _settings(args: argparse.Namespace, port: int) -> MockSettings:
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


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text
