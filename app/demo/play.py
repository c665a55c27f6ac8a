"""`coatcheck demo`: the same agents by three ways to a fleet, one after the other, while things are killed.

Everything is real but the models: processes, sockets, the router, SIGKILL. Workers are mock workers with an engine
(`mocker/engine/`), so that what is cached, and how long a prompt takes, is as it would be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app import Trouble
from app.demo import report
from app.demo.fleet import Fleet
from app.demo.load import (
    ByHash,
    Entrance,
    Figures,
    InTurn,
    Load,
    Served,
    figures,
    no_headers,
    over_time,
    session_headers,
)
from mocker import traces
from mocker.engine import profile as profiles
from mocker.traces import Agents

_AGENTS = Agents(
    sessions=1_000_000,
    rate=0.75,
    prompts=8,
    prompt_tokens=4000,
    turns=6.0,
    turn_tokens=1200,
    answer_tokens=50,
    gap=1.2,
    children=0.15,
)
"""`rate`: for each worker."""
PROFILE = "llama-8b-h100"
_WORKER_DIES, _WORKER_RETURNS, _REPLICA_DIES = 0.4, 0.6, 0.8
"""Parts of a way's time."""
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKS_WIDE = 28
_REFRESH = 0.25
_LOOKED_EVERY = 0.05
_PLAIN_EVERY = 5.0
_PLAIN_WIDE = 130


@dataclass(frozen=True)
class Way:
    """One of those that are compared."""

    key: str
    title: str
    about: str
    replicas: int
    policy: str
    headers: Callable[[str, bool], dict[str, str]]

    def entrance(self, fleet: Fleet) -> Entrance:
        if fleet.replicas:
            return InTurn(list(fleet.replicas.values()))
        return ByHash(list(fleet.workers.values()), fleet.is_up)


def _ways(policy: str) -> list[Way]:
    return [
        Way("turns", "round-robin", "A plain balancer: one worker after the other", 1, "round-robin", no_headers),
        Way("hash", "hash", "A balancer that hashes the session id", 0, "", session_headers),
        Way("coatcheck", "coatcheck", f"Two replicas, claims in a folder, {policy}", 2, policy, session_headers),
    ]


@dataclass
class Run:
    """One way, and what came of it so far."""

    way: Way
    seconds: float
    state: str = "waits"
    """`waits`, `starts`, `runs`, `done`."""
    now: float = 0.0
    served: list[Served] = field(default_factory=list)
    losses: list[tuple[str, float]] = field(default_factory=list)
    replica_losses: list[float] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    """What was done to it, and when."""

    @property
    def figures(self) -> Figures:
        return figures(self.served, self.losses, self.replica_losses)

    def happened(self, what: str) -> None:
        self.events.append((self.now, what))


def agents_for(workers: int, seed: int) -> Agents:
    """As many as so many workers can bear."""
    return replace(_AGENTS, rate=_AGENTS.rate * workers, seed=seed)


def run(args: argparse.Namespace) -> int:
    """Play all ways, show them, write the report. 130 when interrupted; Trouble when something does not start."""
    console = Console(highlight=False)
    plain = args.plain or not console.is_terminal
    if plain:
        console.width = max(console.width, _PLAIN_WIDE)  # what is cut off says nothing
    try:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        is_new = not args.report.exists()
        args.report.open("a").close()  # what cannot be written is said now
        if is_new:
            args.report.unlink()
    except OSError as error:
        raise Trouble(f"--report {args.report}: {error.strerror}", code=2) from None
    runs = [Run(way, args.seconds) for way in _ways(args.policy) if not args.way or way.key in args.way]
    shown = _lines(console, runs) if plain else _picture(console, runs)
    began = time.monotonic()
    try:
        with shown as show, tempfile.TemporaryDirectory(prefix="coatcheck-demo-") as folder:
            asyncio.run(_play(args, runs, Path(folder), show))
    except asyncio.CancelledError:
        console.print("Stopped.")
        return 130
    if plain:
        console.print()
        console.print(_table(runs))
    told = report.Told(
        seed=args.seed, workers=args.workers, profile=PROFILE, policy=args.policy, took=time.monotonic() - began
    )
    args.report.write_text(report.html([_as_told(each) for each in runs], told), "utf-8")
    path = args.report.absolute()
    console.print(f"\nThe report, for a browser: [bold]{path.as_uri()}[/]", soft_wrap=True)
    return 0


async def _play(args: argparse.Namespace, runs: Sequence[Run], folder: Path, show: Callable[[], None]) -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    showing = asyncio.create_task(_keep_showing(show))
    try:
        for each in runs:
            await _play_one(args, each, folder)
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)
        show()


async def _keep_showing(show: Callable[[], None]) -> None:
    while True:
        show()
        await asyncio.sleep(_REFRESH)


async def _play_one(args: argparse.Namespace, played: Run, folder: Path) -> None:
    own = folder / played.way.key
    own.mkdir()
    fleet = Fleet(
        workers=args.workers,
        replicas=played.way.replicas,
        policy=played.way.policy,
        claims=(own / "claims").as_uri() if played.way.replicas > 1 else "memory://",
        profile=PROFILE,
        folder=own,
    )
    with contextlib.closing(fleet):
        played.state = "starts"
        await fleet.start()
        played.state = "runs"
        profile = profiles.load(PROFILE)
        load = Load(
            traces.agents(agents_for(args.workers, args.seed), profile.block_size),
            played.way.entrance(fleet),
            seconds=played.seconds,
            seed=args.seed,
            block_size=profile.block_size,
            headers=played.way.headers,
        )
        played.served = load.served
        both = [asyncio.create_task(load.run()), asyncio.create_task(_act(played, fleet, load))]
        try:
            # What ends that nobody has killed is told at once.
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            for each in done:
                each.result()
        finally:
            for each in both:
                each.cancel()
            await asyncio.gather(*both, return_exceptions=True)
    played.state = "done"


async def _act(played: Run, fleet: Fleet, load: Load) -> None:
    """Kill, start again, and see to it that nothing else dies."""
    seconds, victim = played.seconds, list(fleet.workers)[-1]

    def kill_worker() -> None:
        fleet.kill(victim)
        played.losses.append((victim, load.now))
        played.happened(f"worker {victim} killed")

    def kill_replica() -> None:
        name = list(fleet.replicas)[-1]
        fleet.kill(name)
        played.replica_losses.append(load.now)
        played.happened(f"replica {name} killed")

    async def return_worker() -> None:
        await fleet.start_again(victim)
        played.now = load.now
        played.happened(f"worker {victim} is back, empty")

    returning: list[asyncio.Task[None]] = []
    acts: list[tuple[float, Callable[[], object]]] = [
        (seconds * _WORKER_DIES, kill_worker),
        (seconds * _WORKER_RETURNS, lambda: returning.append(asyncio.create_task(return_worker()))),
    ]
    if len(fleet.replicas) > 1:
        acts.append((seconds * _REPLICA_DIES, kill_replica))
    try:
        while load.now < seconds or acts:
            played.now = load.now
            while acts and played.now >= acts[0][0]:
                acts.pop(0)[1]()
            fleet.check()
            await asyncio.sleep(_LOOKED_EVERY)
        await asyncio.gather(*returning)
    finally:
        for each in returning:
            each.cancel()
    played.now = seconds


# --- what is shown ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _picture(console: Console, runs: Sequence[Run]) -> Iterator[Callable[[], None]]:
    with Live(console=console, auto_refresh=False) as live:
        yield lambda: live.update(_drawn(runs), refresh=True)


@contextlib.contextmanager
def _lines(console: Console, runs: Sequence[Run]) -> Iterator[Callable[[], None]]:
    """A line when something happens, and every few seconds."""
    told: dict[str, Any] = {"state": {}, "events": {}, "next": {}}

    def show() -> None:
        for each in runs:
            key = each.way.key
            if told["state"].get(key, "waits") != each.state:
                told["state"][key] = each.state
                console.print(f"{each.way.title}: {each.way.about}" if each.state == "starts" else _line(each))
            for at, what in each.events[told["events"].get(key, 0) :]:
                console.print(f"{each.way.title} {at:4.0f} s: {what}")
            told["events"][key] = len(each.events)
            if each.state == "runs" and each.now >= told["next"].setdefault(key, _PLAIN_EVERY):
                told["next"][key] += _PLAIN_EVERY
                console.print(_line(each))

    yield show


def _line(played: Run) -> str:
    if not played.served:
        return f"{played.way.title} {played.now:4.0f} s"
    now = played.figures
    return (
        f"{played.way.title} {played.now:4.0f} s: {now.turns} turns, {now.cached_share:.1%} cached, TTFT p50 "
        f"{1000 * now.p50:.0f} ms, p95 {1000 * now.p95:.0f} ms, {now.failed} failed, {now.moved_needlessly} split"
    )


def _drawn(runs: Sequence[Run]) -> RenderableType:
    head = Text.assemble(
        ("coatcheck demo", "bold"),
        ("  the same agents by three ways; each loses a worker, and coatcheck a replica as well", "dim"),
    )
    parts: list[RenderableType] = [head, Text(), _table(runs)]
    playing = next((each for each in runs if each.state in ("starts", "runs")), None)
    if playing is not None:
        part = playing.now / playing.seconds if playing.state == "runs" else 0.0
        full = round(40 * part)
        parts += [
            Text(),
            Text.assemble(
                (f"{playing.way.title}  ", "bold"),
                ("━" * full, "green"),
                ("━" * (40 - full), "bright_black"),
                f"  {playing.now:.0f} of {playing.seconds:.0f} s" if playing.state == "runs" else "  processes start",
            ),
            Text(f"{playing.way.about}.", "dim"),
        ]
    events = [(each, at, what) for each in runs for at, what in each.events]
    if events:
        parts.append(Text())
    parts += [
        Text.assemble((f"{at:5.0f} s  ", "dim"), (f"{each.way.title}: ", "dim"), (what, _colour(what)))
        for each, at, what in events[-7:]
    ]
    return Group(*parts)


def _colour(event: str) -> str:
    return "red" if "killed" in event else "green"


def _table(runs: Sequence[Run]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("way")
    table.add_column("prompt tokens cached", min_width=_SPARKS_WIDE + 7, no_wrap=True)
    for title in ("turns", "TTFT p50", "p95", "failed turns", "sessions split", "moved by a loss"):
        table.add_column(title, justify="right")
    done = [each.figures for each in runs if each.state == "done"]
    for each in runs:
        name = Text(each.way.title, "bold" if each.state != "waits" else "bright_black")
        if not each.served:
            table.add_row(name, Text(each.state, "bright_black"))
            continue
        now = each.figures
        best = each.state == "done" and len(done) > 1 and now.cached_share == max(one.cached_share for one in done)
        table.add_row(
            name,
            Text.assemble((f"{now.cached_share:6.1%} ", "bold green" if best else ""), (_spark(each), "cyan")),
            f"{now.turns:,}",
            f"{1000 * now.p50:,.0f} ms",
            f"{1000 * now.p95:,.0f} ms",
            _failed(now),
            Text(f"{now.moved_needlessly} of {now.sessions}", "yellow" if now.moved_needlessly else "green"),
            str(now.moved_on_loss),
        )
    return table


def _failed(now: Figures) -> Text:
    """What the replica's death has cost stands for itself: the other ways lose none."""
    text = Text(str(now.failed - now.cut_by_replica), "red" if now.failed > now.cut_by_replica else "green")
    return text.append(f" + {now.cut_by_replica} by replica", "dim") if now.cut_by_replica else text


def _spark(played: Run) -> str:
    """The cached share over time."""
    marks = ""
    for _, some in over_time(played.served, played.seconds, played.seconds / _SPARKS_WIDE):
        prompt = sum(one.prompt for one in some)
        share = sum(one.cached for one in some) / prompt if prompt else -1.0
        marks += " " if share < 0 else _SPARKS[min(len(_SPARKS) - 1, int(share * len(_SPARKS)))]
    return marks


def _as_told(played: Run) -> report.Shown:
    return report.Shown(
        key=played.way.key,
        title=played.way.title,
        about=played.way.about,
        seconds=played.seconds,
        served=played.served,
        events=played.events,
        figures=played.figures,
    )
