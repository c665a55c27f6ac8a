"""`coatcheck up`: simulated workers and replicas of the router on this machine, each a process of its own, all stopped
with it.

The claims are files in a folder that lives on, so that sessions survive a restart as they do in a real deployment. It
is named after the first replica's port: two `up`s side by side have different workers and must not share claims.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.text import Text

from app import Trouble, children
from app.config import VARIABLE_PREFIX
from app.fleet.specs import worker_name
from app.listening import is_free
from app.top import in_words, snapshots
from mocker.settings import MockSettings

HOST = "127.0.0.1"
_READY_LIMIT = 30.0
_DRAIN_SECONDS = 1
_STOP_GRACE = 3.5
"""Seconds for all to end before what is left is killed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `run` takes."""
    parser.set_defaults(run=run)
    mock = MockSettings()
    for flag, kind, default, metavar, meaning in (
        ("--port", _number(1, 65535), 8000, "N", "the first replica's port"),
        ("--worker-port", _number(1, 65535), 9001, "N", "the first worker's port"),
        ("--replicas", _number(1, 64), 2, "N", "replicas of the router"),
        ("--workers", _number(1, 64), 2, "N", "simulated workers"),
        ("--ttft-ms", float, mock.ttft_ms, "MS", "a worker's time to first token"),
        ("--itl-ms", float, mock.itl_ms, "MS", "a worker's inter-token latency"),
    ):
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{meaning} (%(default)g)")
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(".coatcheck"),
        metavar="DIR",
        help="where claims are kept from one run to the next (%(default)s in the current folder)",
    )


def run(args: argparse.Namespace) -> int:
    """Run until SIGINT, SIGTERM or SIGHUP (then 0), or until one of the processes ends by itself (then Trouble)."""
    try:
        MockSettings(ttft_ms=args.ttft_ms, itl_ms=args.itl_ms)
    except ValueError as error:
        raise Trouble(str(error), code=2) from None
    try:
        args.state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise Trouble(f"--state {args.state}: {why}; name a folder that you can write to", code=2) from None
    console = Console(soft_wrap=True, highlight=False)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda came, _: signals.append(came))
    with contextlib.closing(_Fleet(args)) as fleet:
        for port, instead in fleet.replaced:
            console.print(f"Port {port} is taken by another program; {instead} is used instead.")
        fleet.start()
        if fleet.wait_until_ready(signals):
            _introduce(console, fleet)
            # Ends with the process: it holds nothing that needs an end of its own.
            threading.Thread(target=_tell_events, args=(console, fleet.replica_urls[0]), daemon=True).start()
        while not signals:
            time.sleep(0.1)
            if not signals:
                fleet.check()
    console.print("Stopped.")
    return 0


class _Member(NamedTuple):
    """One of the processes."""

    what: str
    ready_url: str
    process: subprocess.Popen[bytes]


class _Fleet:
    """The workers and the replicas, all stopped by `close`. Raises Trouble."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Decides who listens where. `replaced`: the wanted ports that are taken, each with the one used instead."""
        ports, replaced = _free_ports(args.port, args.replicas)
        worker_ports, more = _free_ports(args.worker_port, args.workers, ports)
        self.replaced = replaced + more
        self.replica_urls = [f"http://{HOST}:{port}" for port in ports]
        self.worker_urls = [f"http://{HOST}:{port}" for port in worker_ports]
        self.claims = args.state.absolute() / f"claims-{ports[0]}"
        self._latencies = ["--ttft-ms", str(args.ttft_ms), "--itl-ms", str(args.itl_ms)]
        self._members: list[_Member] = []

    def start(self) -> None:
        # Everything is said in flags; the user's variables are for a router of the user's own.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)}
        router = ["app", "serve", "--claims", self.claims.as_uri(), "--drain-timeout", str(_DRAIN_SECONDS)]
        # What the first replica warns of is told as it comes (`_tell_events`); all of them see the same fleet.
        router += ["--log-level", "error", *(f"--worker={url}" for url in self.worker_urls)]
        for what, urls, path, command, stdout in (
            ("worker", self.worker_urls, "/health", ["mocker", *self._latencies], subprocess.DEVNULL),
            ("replica", self.replica_urls, "/ready", router, None),
        ):
            for url in urls:
                port = url.rpartition(":")[2]
                process = children.start(*command, "--port", port, environment=environment, stdout=stdout)
                self._members.append(_Member(f"the {what} at {url}", url + path, process))

    def close(self) -> None:
        children.stop([member.process for member in reversed(self._members)], grace=_STOP_GRACE)

    def wait_until_ready(self, signals: Sequence[int]) -> bool:
        """Until all answer (then True) or a signal comes. Raises Trouble when that takes too long or one ends."""
        give_up = time.monotonic() + _READY_LIMIT
        waiting = self._members
        with httpx.Client(trust_env=False, timeout=1.0) as client:
            while waiting and not signals:
                self.check()
                waiting = [member for member in waiting if not _answers(client, member.ready_url)]
                if waiting and time.monotonic() > give_up:
                    raise Trouble(f"{waiting[0].what} is not ready after {_READY_LIMIT:g} s; all others are stopped")
                time.sleep(0.05)
        return not signals

    def check(self) -> None:
        """Raises Trouble when a process has ended."""
        for what, _, process in self._members:
            code = process.poll()
            if code is not None:
                raise Trouble(f"{what} {children.spoken_end(code)}; all others are stopped")


def _introduce(console: Console, fleet: _Fleet) -> None:
    console.print("\n[bold green]coatcheck is up.[/] Ctrl-C stops it.\n")
    for url in fleet.replica_urls:
        console.print(f"  replica  {url}")
    page = f"  page     {fleet.replica_urls[0]}/admin/  "
    console.print(Text.assemble(page, ("or  ", "dim"), f"{_ourselves()} top --url {fleet.replica_urls[0]}"))
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


def _ourselves() -> str:
    """How this command is started from here, as a person would type it."""
    if shutil.which("coatcheck"):
        return "coatcheck"
    typed = Path(sys.argv[0])
    return shlex.quote(str(typed)) if typed.name == "coatcheck" else f"{shlex.quote(sys.executable)} -m app"


def _tell_events(console: Console, url: str) -> None:
    """One line for each that is news, from now on."""
    told: int | None = None
    with httpx.Client(base_url=url, trust_env=False) as client:
        while True:
            with contextlib.suppress(Trouble):  # of a replica that is gone, whose end is told by who waits for it
                for shown in snapshots(client, url, {}):
                    events = {int(number): event for number, event in shown["events"].items()}
                    for event in news(events, told) if told is not None else ():
                        at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
                        console.print(Text.assemble((f"{at}  ", "dim"), (in_words(event), "yellow")))
                    told = max(events, default=told or 0)
            time.sleep(1.0)


def news(events: Mapping[int, dict[str, Any]], told: int) -> list[dict[str, Any]]:
    """Of a replica's events, by their numbers, those after `told` that are warnings. An operator's word is none: its
    effect is one as well. Errors are in the replica's log, which is shown."""
    later = (events[number] for number in sorted(events) if number > told)
    return [event for event in later if event["level"] == "warning" and event["kind"] != "mark_set"]


def _curl(url: str, *options: str, question: str, session: str | None = None) -> str:
    body: dict[str, Any] = {"model": "mock-model", "messages": [{"role": "user", "content": question}]}
    headers = ["-H", "content-type: application/json"]
    if session:
        body |= {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
        headers += ["-H", f"X-Dynamo-Session-ID: {session}"]
    return shlex.join(["curl", *options, f"{url}/v1/chat/completions", *headers, "-d", json.dumps(body)])


def _client_snippet(url: str, question: str) -> str:
    installed = importlib.util.find_spec("openai") is not None
    python = shlex.quote(sys.executable) if installed else "# needs: pip install openai\npython3"
    return f"""{python} - <<'END'
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none", default_headers={{"X-Dynamo-Session-ID": "demo"}})
messages = [{{"role": "user", "content": "{question}"}}]
answer = client.chat.completions.create(model="mock-model", messages=messages)
print(answer.choices[0].message.content, answer.usage)
END"""


def _free_ports(first: int, count: int, avoid: Container[int] = ()) -> tuple[list[int], list[tuple[int, int]]]:
    """Free ports from `first` on, and for those wanted that are not free, which is used instead. Raises Trouble."""
    free = (port for port in range(first, 65536) if port not in avoid and is_free(HOST, port))
    ports = list(itertools.islice(free, count))
    if len(ports) < count:
        raise Trouble(f"there is no free port from {first} on")
    wanted = range(first, first + count)
    others = (port for port in ports if port not in wanted)
    return ports, [(port, next(others)) for port in wanted if port not in ports]


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.TransportError:
        return False


def _number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {text!r}")
        return int(text)

    return parse
