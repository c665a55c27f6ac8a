"""`coatcheck sessions`, `workers` and `replicas`: the admin API of a running router, from a terminal."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import re
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.table import Table

from app import Trouble
from app.config import SETTINGS
from app.listening import read_place
from app.logs import shown
from app.sessions.tenants import ADMIN_TOKEN
from app.sources import CONFIG_VARIABLE, read_settings

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT = 10.0
"""Seconds that the router has to answer."""
_PAGE = 1000
"""The most sessions that one answer lists."""
_MODELS_SHOWN = 3
_WORDS = ("cordon", "uncordon", "drain", "remove")
_SAID = {
    "add": "is added",
    "cordon": "is cordoned",
    "uncordon": "is in use again",
    "drain": "is draining",
    "remove": "is removed",
}
_NOTHING = "–"
_HASH = re.compile(r"[0-9a-f]{12,40}")
"""A session's hash or the first digits of it, as lists and the log show it."""
_WRONG_USE = frozenset({400, 422})

Ask = Callable[..., dict[str, Any]]
"""`ask(method, path, **query)` answers the JSON or raises Trouble."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """The options that `run` takes; `command`: sessions, workers or replicas."""
    parser.set_defaults(run=run)
    if command == "sessions":
        parser.usage = "coatcheck sessions (list | show ID | close ID) [options]"
        parser.add_argument(
            "action",
            choices=("list", "show", "close"),
            metavar="ACTION",
            help="list: what the replica holds, by hash; show: one session; close: one session, wherever it is held",
        )
        parser.add_argument("id", nargs="?", metavar="ID", help="the session's id, as its client sends it")
        parser.add_argument(
            "--agent", default="", metavar="ID", help="of a child agent within the session (Claude Code)"
        )
        parser.add_argument(
            "--tenant", default="", metavar="NAME", help="whose session it is, where there are API keys"
        )
        parser.add_argument(
            "--hash", action="store_true", help="ID is the hash that lists and the log show, or its first digits"
        )
        parser.add_argument("--worker", default="", metavar="NAME", help="list only sessions at this worker")
        parser.add_argument("--limit", type=_positive, default=50, metavar="N", help="list so many. Default: 50")
        parser.add_argument("--all", action="store_true", help="list all")
    else:
        parser.usage = "coatcheck workers [list | add URL | (cordon | uncordon | drain | remove) NAME] [options]"
        parser.add_argument(
            "action",
            nargs="?",
            default="list",
            choices=("list", "add", *_WORDS),
            metavar="ACTION",
            help="list (the default); add: one more, as --worker has it; cordon: no new sessions; drain: the same, and "
            "its sessions move at the deadline; remove: its sessions move now; uncordon: none of these any more. For "
            "all replicas that share the claims, until it is said otherwise",
        )
        parser.add_argument(
            "id", nargs="?", metavar="NAME", help="the worker's name, or of `add` URL[,name=NAME][,dp=N]"
        )
        parser.add_argument(
            "--deadline", type=_seconds, metavar="SECONDS", help="of drain. Default: its sessions stay until they end"
        )
    add_access(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_access(parser: argparse.ArgumentParser) -> None:
    """The options that say which router to ask, and that one may."""
    place = SETTINGS["admin_listen"].variable
    parser.add_argument(
        "--url",
        metavar="URL",
        help=f"the replica to ask, or unix:/path. Default: its admin-listen [{place}], else {DEFAULT_URL}",
    )
    token = SETTINGS["admin_token"].variable
    parser.add_argument(
        "--token", metavar="TOKEN", help=f"the router's admin token. Default: its own setting [{token}]"
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="CA certificates (PEM) for an https URL. Default: the usual ones"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"the router's file, for its admin token [{CONFIG_VARIABLE}]"
    )


def run(args: argparse.Namespace) -> int:
    """Ask, and print what was answered. Returns the exit code. Raises Trouble."""
    action = args.command if args.command == "replicas" else args.action
    if args.command != "replicas" and (action == "list") == (args.id is not None):
        wanted = "an ID" if args.command == "sessions" else "a URL" if action == "add" else "a NAME"
        wanted = wanted if args.id is None else f"no {wanted.split()[1]}"
        raise Trouble(f"{args.command} {action} takes {wanted}", code=2)
    if args.command == "workers" and args.deadline is not None and action != "drain":
        raise Trouble("--deadline is for drain", code=2)
    url, token = access(args)
    try:
        with client_of(url, token, args.ca) as client:
            does: Mapping[str, Callable[[argparse.Namespace, Ask], None]] = {
                "sessions": {"list": _list, "show": _show, "close": _close},
                "workers": {"list": _workers},
                "replicas": {"replicas": _replicas},
            }[args.command]
            does.get(action, _mark)(args, lambda method, path, **query: _ask(client, method, path, query, url))
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError):
        raise no_url(url) from None
    return 0


def access(args: argparse.Namespace) -> tuple[str, str]:
    """The URL to ask at, and the token that proves that one may; empty: there is none. Raises Trouble."""
    token, url = args.token, args.url
    if token is None or url is None:
        said = read_settings({}, args.config).settings.access
        token = said.token if token is None else token
        url = url or (said.admin_place.url if said.admin_place is not None else DEFAULT_URL)
    if not token.isascii():
        raise Trouble("the admin token is not ASCII; --token must be", code=2)
    return url.rstrip("/"), token.strip()


def no_url(url: str) -> Trouble:
    remedy = f"write one like {DEFAULT_URL}, or unix:/path"
    return Trouble(f"--url {url} is not the URL of a router; {remedy}", code=2)


def client_of(url: str, token: str, ca: Path | None = None) -> httpx.Client:
    """`ca`: a file of certificates to believe the router by. Raises ValueError, httpx.InvalidURL, Trouble."""
    headers = {ADMIN_TOKEN.decode(): token} if token else {}
    path = read_place(url).path if url.startswith("unix:") else None
    # What the environment says of proxies is for the internet.
    try:
        verify = True if ca is None else ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise Trouble(f"--ca {ca} is no file of CA certificates ({error.strerror or error})", code=2) from None
    transport = httpx.HTTPTransport(uds=None if path is None else str(path), trust_env=False, verify=verify)
    base = url if path is None else "http://localhost"
    return httpx.Client(base_url=base, transport=transport, trust_env=False, timeout=_TIMEOUT, headers=headers)


def _ask(client: httpx.Client, method: str, path: str, query: Mapping[str, Any], url: str) -> dict[str, Any]:
    try:
        answer = client.request(method, path, params={name: value for name, value in query.items() if value})
    except httpx.UnsupportedProtocol:
        raise
    except httpx.HTTPError as error:
        raise Trouble(f"the router at {url} cannot be reached ({error or type(error).__name__})") from None
    try:
        said = answer.json()
        if answer.is_success:
            return dict(said)
        message = said["error"]["message"]
    except (ValueError, KeyError, TypeError):
        raise Trouble(f"{url} does not answer as a router (status {answer.status_code})") from None
    if answer.status_code == 403:
        message = f"{message}; give it by --token, {SETTINGS['admin_token'].variable} or --config"
    raise Trouble(str(message), code=2 if answer.status_code in _WRONG_USE else 1)


def _session(args: argparse.Namespace, ask: Ask) -> dict[str, Any]:
    """What names it. A word that may be a hash is one if a session has it."""
    if not args.hash and not args.agent and not args.tenant and _HASH.fullmatch(args.id):
        with contextlib.suppress(Trouble):
            found = ask("GET", "/admin/session", session=args.id, hashed="true")
            return {"session": found["session"], "hashed": "true"}
    return {"session": args.id, "agent": args.agent, "tenant": args.tenant, "hashed": "true" if args.hash else ""}


def _show(args: argparse.Namespace, ask: Ask) -> None:
    session = ask("GET", "/admin/session", **_session(args, ask))
    if args.json:
        _print_json(session)
    else:
        _print_table((), [(name.replace("_", " "), value) for name, value in session.items()])


def _close(args: argparse.Namespace, ask: Ask) -> None:
    said = ask("DELETE", "/admin/session", **_session(args, ask))
    if args.json:
        _print_json(said)
    else:
        print(f"{said['session']} {said['outcome']}")
    if said["outcome"] == "gone":
        raise Trouble("no such session is bound")


def _list(args: argparse.Namespace, ask: Ask) -> None:
    sessions: list[dict[str, Any]] = []
    after = ""
    while True:
        wanted = _PAGE if args.all else min(_PAGE, args.limit - len(sessions))
        page = ask("GET", "/admin/sessions", limit=wanted, after=after, worker=args.worker)
        sessions += page["sessions"]
        after = page["next"] or ""
        if not after or (not args.all and len(sessions) >= args.limit):
            break
    if args.json:
        _print_json({**page, "sessions": sessions})
        return
    if sys.stdout.isatty():
        for session in sessions:
            session["session"] = shown(session["session"])
    columns = ("session", "worker", "rank", "active_here", "age_seconds", "expires_in_seconds", "generation", "source")
    _print_table(columns, [[session[column] for column in columns] for session in sessions])
    counts = ", ".join(f"{name} {count}" for name, count in page["by_worker"].items())
    more = "; there are more: --all" if after else ""
    print(f"{len(sessions)} of the {page['total']} sessions that {page['replica']} holds ({counts}){more}")


def _workers(args: argparse.Namespace, ask: Ask) -> None:
    said = ask("GET", "/admin/workers")
    if args.json:
        _print_json(said)
        return
    for worker in said["absent"]:
        worker["state"] = worker["mark"]
    for worker in [*said["workers"], *said["absent"]]:
        # The state does not always say it: who is down and draining is down.
        word = "uncordoned" if worker["mark"] == "none" else worker["mark"]
        worker["decided"] = f"{word} by {worker['by']} at {_clock(worker['at'])}" if worker["by"] else None
    for worker in said["workers"]:
        worker["ranks"] = " ".join(f"{each['rank']}:{each['in_flight']}" for each in worker["ranks"]) or None
        if worker.get("max_turns") is not None:
            waits = f" +{worker['queued']}" if worker["queued"] else ""
            worker["in_flight"] = f"{worker['in_flight']}/{worker['max_turns']}{waits}"
        worker["models"] = None if worker["models"] is None else _some(worker["models"])
        worker["since"] = _span(worker["since_seconds"])
        if worker["last_error"] is not None:
            worker["last_error"] += f" ({_span(worker['last_error_seconds'])} ago)"
    columns = {
        "name": "name",
        "url": "url",
        "state": "state",
        "since": "since",
        "turns": "turns",
        "in_flight": "in flight",
        "ranks": "ranks",
        "phase": "phase",
        "sessions": "sessions",
        "connections": "connections",
        "errors_per_minute": "errors/min",
        "models": "models",
        "reason": "reason",
        "last_error": "last error",
        "source": "source",
        "decided": "decided",
    }
    rows = [[worker.get(key) for key in columns] for worker in [*said["workers"], *said["absent"]]]
    _print_table(tuple(columns.values()), rows)
    for each in said["sources"]:
        if each["trouble"]:
            print(f"workers from {each['source']}: {each['trouble']}; the last view stands")
    if said["marks_trouble"]:
        print(f"operators' marks: {said['marks_trouble']}; the last ones stand")
    for line in said["differences"]:
        print(line)


def _replicas(args: argparse.Namespace, ask: Ask) -> None:
    said = ask("GET", "/admin/replicas")
    if args.json:
        _print_json(said)
        return
    columns = ("replica", "version", "store", "workers", "turns", "sessions", "up_seconds", "peer_address", "differs")
    for each in said["replicas"]:
        each["replica"] += " (this one)" if each["this"] else ""
        each["differs"] = ", ".join(one["setting"] for one in each["differs"]) or None
    _print_table(columns, [[each[column] for column in columns] for each in said["replicas"]])


def _some(models: list[str]) -> str:
    more = len(models) - _MODELS_SHOWN
    return " ".join(models[:_MODELS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _mark(args: argparse.Namespace, ask: Ask) -> None:
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    if args.action == "add":
        said = ask("POST", "/admin/workers", worker=args.id, by=by)
    else:
        path = f"/admin/workers/{quote(args.id, safe='')}/{args.action}"
        said = ask("POST", path, by=by, deadline=args.deadline)
    if args.json:
        _print_json(said)
        return
    until = f", until {_clock(said['deadline'])}" if said["deadline"] else ""
    print(f"{said['worker']} {_SAID[args.action]}{until}")


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    # Whole lines where nobody looks at them, so that they can be searched.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000)
    cells = [[_cell(value) for value in row] for row in rows]
    room = fitting([column.replace("_", " ") for column in columns], cells, console.width)
    table = Table(box=None, pad_edge=False, show_header=bool(columns))
    for at in room:
        table.add_column(columns[at].replace("_", " "), no_wrap=True)
    if not columns:
        room = range(max(map(len, cells), default=0))
    for row in cells:
        table.add_row(*(row[at] for at in room))
    with console.capture() as printed:  # a pipe that is closed is for whoever has begun this command to hear of
        console.print(table)
    print(printed.get(), end="")
    if columns and len(room) < len(columns):
        left = ", ".join(columns[at].replace("_", " ") for at in range(len(columns)) if at not in room)
        print(f"(left out for this terminal's width: {left}; --json has them)")


def fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Sequence[int]:
    """Which columns have room: without those that say nothing, and then without the last ones, never the first two."""
    widths = [max([len(name), *(len(row[at]) for row in rows)]) for at, name in enumerate(columns)]
    shown = list(range(len(columns)))
    if sum(widths) + len(shown) > width:
        shown = [at for at in shown if at < 2 or any(row[at] != _NOTHING for row in rows)]
    while len(shown) > 2 and sum(widths[at] for at in shown) + len(shown) > width:
        shown.pop()
    return shown


def _span(seconds: float) -> str:
    """A length of time, in its largest two units."""
    whole = int(seconds)
    for unit, length, smaller, part in (("d", 86_400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length}{unit}{whole % length // part}{smaller}"
    return f"{whole}s"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _NOTHING if value is None else str(value)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of seconds, 0 or more")
    return seconds


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)
