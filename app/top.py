"""`coatcheck top`: what the operators' page shows, in a terminal, from the same stream."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any, get_args

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app import Trouble
from app.overview import Order, merge
from app.remote import access, add_access, client_of, no_url

_SILENCE = 30.0
"""Seconds without a word after which the stream is read anew; a word comes every two."""
_AGAIN = 2.0
_BLOCKS = " ▁▂▃▄▅▆▇█"
_HOWS = {
    "cached": ("known", "blue"),
    "stored": ("found", "cyan"),
    "created": ("new", "magenta"),
    "none": ("no session", "bright_black"),
    "bypassed": ("bypassed", "yellow"),
    "rebound": ("moved", "bright_red"),
    "degraded": ("no store", "bright_magenta"),
    "failed": ("failed", "red"),
}
_STATES = {"up": "green", "down": "bold red", "suspect": "yellow"}
_LEVELS = {"error": "red", "warning": "yellow", "info": "default"}
_BAR = 8
_LEAST = 12
"""Lines that are left to workers on a low terminal."""
_EVENTS = 6

Json = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `run` takes."""
    parser.set_defaults(run=run)
    parser.add_argument("--once", action="store_true", help="print it once, and end")
    parser.add_argument(
        "--order",
        choices=get_args(Order),
        default="state",
        help="what workers are sorted by. Default: state, the worst first",
    )
    parser.add_argument(
        "--find", default="", metavar="TEXT", help="only workers whose name, state or model is like that"
    )
    add_access(parser)


def run(args: argparse.Namespace) -> int:
    """Until Ctrl-C. Raises Trouble."""
    url, token = access(args)
    query = {"order": args.order, "find": args.find}
    console = Console(highlight=False, markup=False)
    try:
        with client_of(url, token, args.ca) as client:
            if args.once:
                console.print(frame(next(snapshots(client, url, query)), console.width, 10_000))
                return 0
            with Live(console=console, screen=True, auto_refresh=False) as live:
                _watch(client, url, query, live)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError):
        raise no_url(url) from None
    except KeyboardInterrupt:
        return 0
    return 0


def _watch(client: httpx.Client, url: str, query: dict[str, str], live: Live) -> None:
    shown: Json | None = None
    while True:
        try:
            for shown in snapshots(client, url, query):
                console = live.console
                live.update(frame(shown, console.width, console.height), refresh=True)
        except Trouble as trouble:
            if shown is None:
                raise
            lost = Text(f"{trouble}; trying again", style="red")
            live.update(Group(lost, frame(shown, live.console.width, live.console.height - 1)), refresh=True)
        time.sleep(_AGAIN)


def snapshots(client: httpx.Client, url: str, query: dict[str, str]) -> Iterator[Json]:
    """The fleet as it is, again and again, until the stream ends. Raises Trouble."""
    shown: Json = {}
    try:
        with client.stream("GET", "/admin/stream", params=query, timeout=httpx.Timeout(10, read=_SILENCE)) as answer:
            if answer.status_code != 200:
                answer.read()
                raise Trouble(_message(answer, url))
            name = ""
            for line in _lines(answer):
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    said = json.loads(value)
                    if name == "snapshot":
                        shown = said
                    else:
                        merge(shown, said)
                    yield shown
            if not shown:
                raise Trouble(f"{url} does not answer as a router (no event came)")
    except httpx.UnsupportedProtocol:
        raise
    except httpx.HTTPError as error:
        raise Trouble(f"the router at {url} cannot be reached ({error or type(error).__name__})") from None


def _lines(answer: httpx.Response) -> Iterator[str]:
    # httpx's own would also end one at U+0085, U+2028 and U+2029, which JSON may have within a text.
    left = ""
    for text in answer.iter_text():
        *lines, left = (left + text).split("\n")
        yield from (line.removesuffix("\r") for line in lines)


def _message(answer: httpx.Response, url: str) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{url} does not answer as a router (status {answer.status_code})"


# --- one frame -------------------------------------------------------------------------------------------------------


def frame(shown: Json, width: int, height: int) -> RenderableType:
    """All of it, in so many columns and, as far as that goes, lines."""
    replicas, events = shown["replicas"], sorted(shown.get("events", {}).items(), key=lambda each: -int(each[0]))
    room = max(_LEAST, height - 12 - len(replicas) - (_EVENTS + 2 if events else 0))
    parts: list[RenderableType] = [
        _title(shown),
        *_figures(shown),
        Text(),
        *_turns(shown, width),
        Text(),
        _workers(shown, room),
        Text(),
        _replicas(shown),
    ]
    if events:
        parts.append(Text())
        parts += [_event(event) for _, event in events[:_EVENTS]]
    elif not shown["access"]["whole"]:
        parts.append(Text("\nreasons, sessions and events are for whoever has the admin token", style="bright_black"))
    return Group(*parts)


def _line(*pairs: tuple[str, str] | str) -> Text:
    text = Text(overflow="ellipsis", no_wrap=True)
    for pair in pairs:
        text.append(*((pair,) if isinstance(pair, str) else pair))
    return text


def _title(shown: Json) -> Text:
    fleet = shown["fleet"]
    states = ", ".join(f"{count} {state}" for state, count in fleet["states"].items())
    how = "yellow" if fleet["available"] < fleet["workers"] else "green"
    at = time.strftime("%H:%M:%S", time.localtime(shown["at"]))
    ends = ("  draining", "bold yellow") if fleet["draining"] else ""
    return _line(("coatcheck ", "bold"), (at, "bright_black"), "  ", (states or "no worker", how), ends)


def _figures(shown: Json) -> Iterator[Text]:
    # What is unknown, as while no turn comes, is not there: a merge patch cannot say null.
    fleet = shown["fleet"]
    least, most = fleet["sessions_least"], fleet["sessions_most"]
    bad = "red" if fleet["failed"] else "bold"
    yield _line(
        (f"{fleet['turns_per_second']:.1f}", "bold"), " turns/s  ",
        (str(fleet["running"]), "bold"), " running  ", (str(fleet["waiting"]), "bold"), " waiting  ",
        (_percent(fleet.get("failed_percent")), bad), " failed  first token ",
        (_ms(fleet.get("ttft_p50_ms")), "bold"), " p95 ", (_ms(fleet.get("ttft_p95_ms")), "bold"),
    )  # fmt: skip
    store = "green" if fleet["store"] == "up" else "bold red"
    yield _line(
        (_percent(fleet.get("kept_percent")), "bold"), " kept  ",
        (_percent(fleet.get("cached_percent")), "bold"), " cached  ",
        (str(most) if least == most else f"{least}–{most}", "bold"), " sessions  store ",
        (fleet["store"], store), f" {_ms(fleet.get('store_ms'))}",
    )  # fmt: skip


def _turns(shown: Json, width: int) -> Iterator[Text]:
    """How they came: a bar for each slot of the last quarter of an hour, and what they add up to."""
    series, seconds = shown["slot"]["series"], shown["slot"]["seconds"]
    last = int(shown["at"] // seconds)
    room = min(shown["slot"]["count"], width - 10)
    rows = [shown["chart"].get(str(slot)) for slot in range(last - room + 1, last + 1)]
    hows = [series.index(how) for how in _HOWS if how != "failed"]
    failed = series.index("failed")
    totals = [0 if row is None else sum(row[at] for at in hows) for row in rows]
    most = max(totals, default=0)
    text = _line((f"{most / seconds:>7.1f}/s ", "bright_black"))
    for row, total in zip(rows, totals, strict=True):
        level = -(-total * (len(_BLOCKS) - 1) // most) if most else 0
        text.append(_BLOCKS[level], "red" if row is not None and row[failed] else "blue")
    yield text
    sums = {how: sum(row[series.index(how)] for row in shown["chart"].values()) for how in _HOWS}
    yield _line(
        " " * 10,
        *(
            part
            for how, count in sums.items()
            if count
            for part in ((f"{count} ", _HOWS[how][1]), f"{_HOWS[how][0]}  ")
        ),
    )


def _workers(shown: Json, room: int) -> RenderableType:
    said = shown["workers"]
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bright_black", expand=False)
    table.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=18, min_width=10)
    table.add_column("state", no_wrap=True)
    table.add_column("since", justify="right", no_wrap=True)
    for name in ("turns/m", "run"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("sessions", no_wrap=True)
    for name in ("fail/m", "p95", "cached"):
        table.add_column(name, justify="right", no_wrap=True)
    names = [name for name in said["order"] if name in said["rows"]]
    for name in names[:room]:
        row = said["rows"][name]
        full = round(_BAR * row["sessions"] / said["most_sessions"]) if said["most_sessions"] else 0
        queued = f"+{row['queued']}" if row["queued"] else ""
        table.add_row(
            name,
            Text(row["state"], _STATES.get(row["state"], "yellow")),
            _span(shown["at"] - row["since"]),
            f"{row['turns_per_minute']:.0f}",
            f"{row['in_flight']}{queued}",
            Text.assemble(
                (f"{row['sessions']:>4} ", "default"), ("█" * full, "blue"), ("·" * (_BAR - full), "bright_black")
            ),
            Text(str(row["errors_per_minute"]), "bold red" if row["errors_per_minute"] else "bright_black"),
            _ms(row.get("ttft_p95_ms")),
            _percent(row.get("cached_percent")),
        )
    left = said["found"] - min(room, len(names))
    return Group(table, Text(f"and {left} more", style="bright_black")) if left else table


def _replicas(shown: Json) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bright_black")
    table.add_column("replica", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("agrees", overflow="ellipsis", no_wrap=True, max_width=18)
    for name in ("turns", "sessions", "lag", "store"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(shown["replicas"].values(), key=lambda row: (not row["this"], row["replica"])):
        differs = ", ".join(row["differs"])
        agrees = Text(differs, "bold red") if differs else Text("silent" if row["silent_seconds"] else "yes", "green")
        store = _ms(row.get("store_ms")) if row["store"] == "up" else row["store"]
        name = f"{row['replica']}{' *' if row['this'] else ''}"
        table.add_row(name, agrees, str(row["turns"]), str(row["sessions"]), _ms(row.get("lag_ms")), store)
    return table


def _event(event: Json) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    return _line((f"{at} ", "bright_black"), (in_words(event), _LEVELS.get(event["level"], "default")))


def in_words(event: Json) -> str:
    """What an event says, and of which worker where it does not name one."""
    said, worker = str(event["message"]), str(event["fields"].get("worker", ""))
    return said if worker in said else f"{said}, at {worker}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}%" if value == 100 else f"{value:.1f}%"


def _ms(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}ms" if value < 1000 else f"{value / 1000:.1f}s"


def _span(seconds: float) -> str:
    whole = max(0, int(seconds))
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if whole >= length:
            return f"{whole // length}{unit}"
    return f"{whole}s"
