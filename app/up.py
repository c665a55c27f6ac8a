"""`coatcheck up`: simulated workers and replicas of the router on this machine, each a process of its own, all stopped
with it.

The claims are files in a folder that lives on, so that sessions survive a restart as they do in a real deployment. It
is named after the first replica's port: two `up`s side by side have different workers and must not share claims.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.text import Text

from app import children
from app.config import VARIABLE_PREFIX
from app.fleet.workers import worker_name
from mocker.settings import MockSettings

HOST = "127.0.0.1"
_READY_LIMIT = 30.0
_DRAIN_SECONDS = 1
_STOP_GRACE = 3.5
"""Seconds for all to end before what is left is killed."""


class UpError(Exception):
    """It cannot be brought up, or did not stay up; the message is for the user."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `run` takes."""
    defaults = MockSettings()
    parser.add_argument(
        "--port", type=_number(1, 65535), default=8000, metavar="N", help="the first replica's port (%(default)s)"
    )
    parser.add_argument(
        "--worker-port", type=_number(1, 65535), default=9001, metavar="N", help="the first worker's port (%(default)s)"
    )
    parser.add_argument(
        "--replicas", type=_number(1, 64), default=2, metavar="N", help="replicas of the router (%(default)s)"
    )
    parser.add_argument(
        "--workers", type=_number(1, 64), default=2, metavar="N", help="simulated workers (%(default)s)"
    )
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(".coatcheck"),
        metavar="DIR",
        help="where claims are kept from one run to the next (%(default)s in the current folder)",
    )
    parser.add_argument(
        "--ttft-ms",
        type=float,
        default=defaults.ttft_ms,
        metavar="MS",
        help="a worker's time to first token (%(default)g)",
    )
    parser.add_argument(
        "--itl-ms",
        type=float,
        default=defaults.itl_ms,
        metavar="MS",
        help="a worker's inter-token latency (%(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Run until SIGINT, SIGTERM or SIGHUP (then 0), or until one of the processes ends by itself (then 1)."""
    try:
        MockSettings(ttft_ms=args.ttft_ms, itl_ms=args.itl_ms)
    except ValueError as error:
        return _fail(2, str(error))
    console = Console(soft_wrap=True, highlight=False)
    stopped = _Signals()
    fleet = _Fleet(args)
    try:
        taken = fleet.choose_ports()
        for port, instead in taken:
            console.print(f"Port {port} is taken by another program; {instead} is used instead.")
        fleet.start()
        fleet.wait_until_ready(stopped)
        if not stopped:
            _introduce(console, fleet)
        while not stopped:
            time.sleep(0.1)
            if not stopped:
                fleet.check()
    except UpError as error:
        return _fail(1, f"{error}; all others are stopped")
    finally:
        fleet.stop()
    console.print("Stopped.")
    return 0


class _Signals:
    """True once the user wants it to end."""

    def __init__(self) -> None:
        self._came = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def __bool__(self) -> bool:
        return self._came


class _Member(NamedTuple):
    """One of the processes."""

    what: str
    ready_url: str
    process: subprocess.Popen[bytes]


class _Fleet:
    """The workers and the replicas."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.claims = Path()
        self.worker_urls: list[str] = []
        self.replica_urls: list[str] = []
        self._workers: list[_Member] = []
        self._replicas: list[_Member] = []

    def choose_ports(self) -> list[tuple[int, int]]:
        """Decide who listens where. Answers the wanted ports that are taken, each with the one used instead."""
        args = self._args
        ports, replaced = _free_ports([args.port + i for i in range(args.replicas)], ())
        worker_ports, more = _free_ports([args.worker_port + i for i in range(args.workers)], ports)
        self.replica_urls = [f"http://{HOST}:{port}" for port in ports]
        self.worker_urls = [f"http://{HOST}:{port}" for port in worker_ports]
        self.claims = args.state.absolute() / f"claims-{ports[0]}"
        return replaced + more

    def start(self) -> None:
        args = self._args
        # Everything is said in flags; the user's variables are for a router of the user's own.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)}
        for url in self.worker_urls:
            command = ["--port", _port(url), "--ttft-ms", str(args.ttft_ms), "--itl-ms", str(args.itl_ms)]
            process = children.start("mocker", *command, environment=environment, stdout=subprocess.DEVNULL)
            self._workers.append(_Member(f"the worker at {url}", f"{url}/health", process))
        for url in self.replica_urls:
            command = ["serve", "--port", _port(url), "--claims", self.claims.as_uri(), "--log-level", "warning"]
            command += ["--drain-timeout", str(_DRAIN_SECONDS)]
            command += [word for worker in self.worker_urls for word in ("--worker", worker)]
            process = children.start("app", *command, environment=environment)
            self._replicas.append(_Member(f"the replica at {url}", f"{url}/ready", process))

    def wait_until_ready(self, stopped: _Signals) -> None:
        """Raises UpError when that takes too long or one of them ends."""
        give_up = time.monotonic() + _READY_LIMIT
        waiting = [*self._workers, *self._replicas]
        with httpx.Client(trust_env=False, timeout=1.0) as client:
            while waiting and not stopped:
                self.check()
                waiting = [member for member in waiting if not _answers(client, member.ready_url)]
                if time.monotonic() > give_up:
                    raise UpError(f"{waiting[0].what} is not ready after {_READY_LIMIT:g} s")
                time.sleep(0.05)

    def check(self) -> None:
        """Raises UpError when a process has ended."""
        for member in (*self._workers, *self._replicas):
            code = member.process.poll()
            if code is not None:
                raise UpError(f"{member.what} {children.spoken_end(code)}")

    def stop(self) -> None:
        children.stop([member.process for member in (*self._replicas, *self._workers)], grace=_STOP_GRACE)


def _introduce(console: Console, fleet: _Fleet) -> None:
    console.print("\n[bold green]coatcheck is up.[/] Ctrl-C stops it.\n")
    for url in fleet.replica_urls:
        console.print(f"  replica  {url}")
    for url in fleet.worker_urls:
        console.print(f"  worker   {url}  [dim]simulated; the router calls it {worker_name(url)}[/]")
    console.print(Text(f"  claims   {fleet.claims}"))
    first, last = fleet.replica_urls[0], fleet.replica_urls[-1]
    question = "Where is my coat?"
    for title, command in (
        ("A question:", _curl(first, "-s", question=question)),
        (
            "One session at two replicas; compare X-Coatcheck-Worker and cached_tokens:",
            "\n".join(_curl(url, "-sN", "-D", "-", question=question, session="demo") for url in (first, last)),
        ),
        ("The official Python client:", _client_snippet(first, question)),
    ):
        console.print(f"\n[bold]{title}[/]")
        console.print(Text(command))
    console.print()


def _curl(url: str, *options: str, question: str, session: str | None = None) -> str:
    body: dict[str, Any] = {"model": "mock-model", "messages": [{"role": "user", "content": question}]}
    if session:
        body |= {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    headers = ["content-type: application/json", *([f"X-Dynamo-Session-ID: {session}"] if session else [])]
    words = ["curl", *options, f"{url}/v1/chat/completions"]
    words += [word for header in headers for word in ("-H", header)]
    return shlex.join([*words, "-d", json.dumps(body)])


def _client_snippet(url: str, question: str) -> str:
    installed = importlib.util.find_spec("openai") is not None
    python = shlex.quote(sys.executable) if installed else "python3"
    lines = [] if installed else ["# needs: pip install openai"]
    return "\n".join(
        [
            *lines,
            f"{python} - <<'END'",
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{url}/v1", api_key="none", default_headers={{"X-Dynamo-Session-ID": "demo"}})',
            f'messages = [{{"role": "user", "content": "{question}"}}]',
            'answer = client.chat.completions.create(model="mock-model", messages=messages)',
            "print(answer.choices[0].message.content, answer.usage)",
            "END",
        ]
    )


def _free_ports(wanted: Sequence[int], avoid: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """A free port for each that is wanted, and for which ones another was found. Raises UpError."""
    ports: list[int] = []
    replaced: list[tuple[int, int]] = []
    for port in wanted:
        unusable = {*ports, *avoid, *wanted[len(ports) + 1 :]}
        found = port
        while found <= 65535 and (found in unusable - {port} or found in (*ports, *avoid) or not _is_free(found)):
            found += 1
        if found > 65535:
            raise UpError(f"there is no free port from {port} on")
        if found != port:
            replaced.append((port, found))
        ports.append(found)
    return ports, replaced


def _is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.TransportError:
        return False


def _port(url: str) -> str:
    return url.rpartition(":")[2]


def _number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text!r}")
        return int(text)

    return parse


def _fail(code: int, message: str) -> int:
    print(f"coatcheck up: {message}", file=sys.stderr)
    return code
