"""Running the router: uvicorn, signals, and the processes of `--processes N`.

On a first SIGTERM or SIGINT `/ready` fails while turns are still taken; after `drain_delay` the port closes and running
turns get `drain_timeout` to end. A second signal exits at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import itertools
import json
import logging
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import FrameType
from typing import Any, Literal, cast

import uvicorn
from fastapi import FastAPI

from app import Trouble, children, logs, version
from app.config import Settings
from app.gathering import Gathering
from app.http.client import ClientLimits, client_protocol
from app.http.origins import Origins
from app.http.reader import Route
from app.http.tcp import is_quiet
from app.http.tls import AcceptedTls
from app.logs import event
from app.main import Router, create_app
from app.reloading import LOOK_EVERY, NOT_TAKEN_UP, Passed, Rereading
from app.sockets import BACKLOG, Listeners, advertised, listening, peer_listeners, where
from app.values import mask

log = logging.getLogger("coatcheck")

_SETTINGS_VARIABLE = "COATCHECK_EFFECTIVE_SETTINGS"
"""How the processes of `--processes N` get the settings that were read and checked once."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_KEPT_BYTES = 16 * 1024 * 1024
_NEW_OBJECTS = 10_000
_STOP_MARGIN = 5.0
"""Seconds that a process gets beyond its drain limits before it is killed."""
_TO_TELL = 0.5
"""Seconds before the end of a drain, at least, at which turns that still wait are told; a tenth of a long one."""
_SHORT_LIFE = 1.0
"""A process that lived shorter than this, in seconds, is replaced only after such a pause."""


def serve(rereading: Rereading) -> int:
    """Serve until a signal, with logging configured. Returns the exit code. Raises Trouble where it cannot listen."""
    settings = rereading.settings
    raise_open_files()
    signal.signal(signal.SIGHUP, lambda number, frame: rereading.ask())
    with listening(settings) as listeners:
        if settings.listen.processes > 1:
            return _Supervisor(rereading, listeners).run()
        with peer_listeners(settings) as peers:
            server = Server(
                create_app(settings, peer_place=advertised(settings, peers)),
                settings,
                listeners.admin,
                peers,
                announce=lambda: _announce(settings, listeners),
                changes=rereading.changes,
            )
            server.run(listeners.public)
    return 0


def raise_open_files() -> int:
    """Let this process and its children have as many files open as the system allows: a connection is one. Returns how
    many that is; -1: without limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # above what the kernel takes, or not ours to change
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
    return soft


def configure_logging(settings: Settings) -> None:
    """As they say, for this process. One of several says its own replica's name, their parent what those begin with."""
    process = settings.process
    logs.set_up(process.log_level, process.log_format, settings.store.replica)


class _Protocol:
    """Makes the protocols of clients' connections, by the limits and the certificate of the moment."""

    def __init__(
        self, route: Route, draining: Callable[[], bool], origins: Origins | None, *, speaks_tls: bool = False
    ) -> None:
        self._route, self._draining, self._origins, self._speaks_tls = route, draining, origins, speaks_tls
        self._made: Callable[..., asyncio.Protocol]
        self._handshake_limit = 0.0
        self._tls: ssl.SSLContext | None = None

    def limit(self, settings: Settings, tls: ssl.SSLContext | None) -> None:
        """For the connections that come from now on; `tls`: if it is spoken here."""
        self._tls = tls if self._speaks_tls else None
        self._handshake_limit = settings.limits.client_head_timeout
        limits = ClientLimits(
            head_bytes=settings.limits.max_header_bytes,
            head_wait=settings.limits.client_head_timeout,
            body_wait=settings.limits.client_body_timeout,
            read_wait=settings.limits.client_read_timeout,
            idle=settings.listen.keepalive_timeout,
        )
        self._made = client_protocol(self._route, self._draining, limits, self._origins)

    def __call__(self, **how: Any) -> asyncio.Protocol:
        made = self._made(**how)
        if self._tls is None:
            return made
        waiting = how["server_state"].connections
        loop = asyncio.get_running_loop()
        return AcceptedTls(loop, made, self._tls, limit=self._handshake_limit, connections=waiting)


class _Farewell:
    """Tells how a router ends, each step once."""

    def __init__(self, running: Callable[[], int], cut: Callable[[], int]) -> None:
        """How many turns are `running`, and were `cut`."""
        self._cut = cut
        self._running = running
        self._told = False

    def begins(self, delay: float) -> None:
        if not self._told:
            self._told = True
            turns = self._running()
            text = "draining: /ready fails now, and the port closes in %g s; %d turns run"
            log.info(text, delay, turns, extra=event("draining", seconds=delay, turns=turns))

    def port_closes(self, limit: float) -> None:
        turns = self._running()
        text = "the port is closed; %d turns that run have %g s to end"
        log.info(text, turns, limit, extra=event("port_closed", turns=turns, seconds=limit))

    def ends(self) -> None:
        cut = self._cut()
        log.info("stopped%s", f"; {cut} turns were cut" if cut else "", extra=event("stopped", cut=cut))


class Server(uvicorn.Server):
    """One router process on sockets that are already bound.

    `forceful`: a second signal ends it at once. Children of a supervisor are not: what stops a whole group of processes
    reaches them twice, directly and from their parent, and the parent has its own limits.
    """

    def __init__(
        self,
        router: Router,
        settings: Settings,
        admin_sockets: Sequence[socket.socket] = (),
        peer_sockets: Sequence[socket.socket] = (),
        *,
        announce: Callable[[], None] = lambda: None,
        changes: Callable[[], AsyncIterator[Settings]] | None = None,
        forceful: bool = True,
    ) -> None:
        """`changes`: the settings whenever they change."""

        tls = settings.listen.tls()

        def config(
            app: FastAPI, route: Route, lifespan: Literal["on", "off"] = "off", *, speaks_tls: bool
        ) -> uvicorn.Config:
            origins = router.origins if lifespan == "on" else None
            protocol = _Protocol(route, lambda: router.draining, origins, speaks_tls=speaks_tls)
            protocol.limit(settings, tls)
            self._protocols.append(protocol)
            return uvicorn.Config(
                app,
                loop="uvloop",
                http=cast(type[asyncio.Protocol], protocol),  # uvicorn only calls it
                ws="none",
                lifespan=lifespan,
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=settings.process.drain_timeout,
            )

        self._protocols: list[_Protocol] = []
        self._changes = changes
        self._following: asyncio.Task[None] | None = None
        super().__init__(config(router, router.proxy_of, "on", speaks_tls=True))
        admin = settings.access.admin_place
        admin_tls = admin is not None and admin.path is None
        self._beside = (
            (config(router.admin_side, lambda path: None, speaks_tls=admin_tls), admin_sockets),
            (config(router, lambda path: router.door, speaks_tls=False), peer_sockets),
        )
        """What is served on listeners of its own."""
        self._router = router
        self._drain_delay = settings.process.drain_delay
        self._announce = announce
        self._forceful = forceful
        self._exit_at: float | None = None
        self._farewell = _Farewell(lambda: router.turns.count if self.started else 0, lambda: router.metrics.turns_cut)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        _keep_freed_memory()
        _spare_collections()
        super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self.serve_beside()
        if self.started:
            if self._changes is not None:
                self._following = asyncio.create_task(self.follow(self._changes()))
            self._announce()

    async def follow(self, changes: AsyncIterator[Settings]) -> None:
        """Take up what may change while turns run."""
        async for settings in changes:
            try:
                tls = settings.listen.tls()
                await self._router.follow(settings)
            except (ValueError, OSError) as error:  # it has changed once more since it was checked
                said = mask(str(error))
                log.warning(NOT_TAKEN_UP, said, extra=event("reload_refused", reason=said))
            except Exception:  # a fault of ours: the operator sees it in the log, and turns go on
                log.exception("the settings could not be taken up")
            else:
                for protocol in self._protocols:
                    protocol.limit(settings, tls)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._following is not None:
            self._following.cancel()
        self._farewell.port_closes(self.config.timeout_graceful_shutdown or 0)
        capacity = self._router.capacity
        if capacity is not None:
            # Turns that still wait when this time is nearly over will not be served. They are told, not cut.
            seconds = self.config.timeout_graceful_shutdown or 0
            asyncio.get_running_loop().call_later(max(0.0, seconds - max(_TO_TELL, seconds / 10)), capacity.close)
        await self.take_who_waits(sockets or ())
        await super().shutdown(sockets)
        self._farewell.ends()

    async def take_who_waits(self, sockets: Sequence[socket.socket]) -> None:
        """Accept who has connected and waits for that: when the port closes, the kernel resets them, with the turns
        that they may have sent. Where the machine is busy, they are those of many milliseconds."""
        listeners = [*sockets, *itertools.chain(*(sockets for _, sockets in self._beside))]
        for _ in range(BACKLOG):  # the loop may accept one at a time, and others come meanwhile
            await asyncio.sleep(0)
            if all(map(is_quiet, listeners)):
                break

    async def serve_beside(self) -> None:
        """The other listeners, as uvicorn makes the first: closed, drained and waited for with it."""
        for served, sockets in self._beside:
            if sockets:
                served.load()
                made: Callable[[], asyncio.Protocol] = functools.partial(
                    cast(Any, served.http_protocol_class),
                    config=served,
                    server_state=self.server_state,
                    app_state=self.lifespan.state,
                )
            for listener in sockets:
                loop = asyncio.get_running_loop()
                self.servers.append(await loop.create_server(made, sock=listener, backlog=BACKLOG))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The signals are not noted as captured: uvicorn would raise them again in the end, and this is no failure.
        if self._exit_at is None:
            self._router.draining = True
            self._exit_at = time.monotonic() + self._drain_delay
            self.should_exit = not self._drain_delay
        elif self._forceful:
            # Not by uvicorn's `force_exit`, which still waits here and there and tells of the tasks that it leaves.
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    async def on_tick(self, counter: int) -> bool:
        if self._exit_at is not None:
            # Not from the signal's handler, which may have come in the middle of a line.
            self._farewell.begins(self._drain_delay)
            self.should_exit = self.should_exit or time.monotonic() >= self._exit_at
        return await super().on_tick(counter)


def _keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next large body instead of giving it back to the system, and having every
    page of it cleared again: a third of the cost of a body of 400 kB. Elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            libc.mallopt(parameter, _KEPT_BYTES)


def _spare_collections() -> None:
    """Have Python look for garbage only where there may be some. What is there when serving begins lives as long as the
    process: 79,000 objects, with which a full collection stops every stream for 50 to 100 ms, and without them for a
    few. And of Python's 700 new objects, after which it looks at them, all belong to turns that run: 64 at once had
    it look every 110 turns, for 1 to 2 % of their cost, and find nothing, because turns leave no circles behind."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


class _Supervisor:
    """The parent of `--processes N`: starts them on its sockets, replaces those that die, stops them together."""

    def __init__(self, rereading: Rereading, listeners: Listeners) -> None:
        self._settings = rereading.settings
        self._rereading = rereading
        self._passed = Passed()
        self._gathering = Gathering()
        self._look_at = 0.0
        self._listeners = listeners
        self._numbers = itertools.count(1)
        self._running: dict[subprocess.Popen[bytes], float] = {}
        self._signals = 0

    def run(self) -> int:
        """Until a signal, or until a process cannot start. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            for _ in range(self._settings.listen.processes):
                self._start()
            _announce(self._settings, self._listeners)
            while not self._signals:
                time.sleep(0.1)
                self._pass_on()
                for child in [child for child in self._running if child.poll() is not None]:
                    if self._signals:
                        break
                    lived = time.monotonic() - self._running.pop(child)
                    children.stop([child], grace=0)
                    if child.returncode > 0:
                        # It gave up by itself, as they do when they cannot start. The next one would do the same.
                        said = event("process_failed", process=child.pid, code=child.returncode)
                        text = "process %d ended with exit code %d; all are stopped"
                        log.error(text, child.pid, child.returncode, extra=said)
                        return 1
                    ended = children.spoken_end(child.returncode)
                    said = event("process_lost", process=child.pid, reason=ended)
                    log.error("process %d %s; another one takes its place", child.pid, ended, extra=said)
                    if lived < _SHORT_LIFE:
                        time.sleep(_SHORT_LIFE)
                    self._start()
            return 0
        finally:
            for listener in itertools.chain(*self._listeners):
                listener.close()  # the processes have their own; in ours connections would wait for nobody
            drain = self._settings.process.drain_delay + self._settings.process.drain_timeout
            children.stop(self._running, grace=drain + _STOP_MARGIN, hurried=lambda: self._signals > 1)
            self._gathering.close()

    def _pass_on(self) -> None:
        """Settings that have changed, to all processes."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_EVERY
        settings = self._rereading.again(self._rereading.stamps())
        if settings is not None:
            try:
                self._passed.write(settings)
            except (ValueError, OSError) as error:  # a file with a secret has changed once more since it was checked
                said = mask(str(error))
                log.warning(NOT_TAKEN_UP, said, extra=event("reload_refused", reason=said))
            else:
                self._settings = settings

    def _start(self) -> None:
        replica = f"{self._settings.store.replica}-{next(self._numbers)}"
        store = self._settings.store.model_copy(update={"replica": replica})
        environment = os.environ | {_SETTINGS_VARIABLE: self._settings.model_copy(update={"store": store}).dump()}
        channel = self._gathering.admit(replica)
        descriptors = [[listener.fileno() for listener in each] for each in self._listeners]
        passed = self._passed.descriptor
        child = children.start(
            "app.serve",
            json.dumps(descriptors),
            str(passed),
            str(channel.fileno()),
            environment=environment,
            pass_fds=[passed, channel.fileno(), *itertools.chain(*descriptors)],
        )
        channel.close()  # the process has its own
        self._running[child] = time.monotonic()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def _announce(settings: Settings, listeners: Listeners) -> None:
    processes = settings.listen.processes
    scheme = "http" if settings.listen.tls_cert is None else "https"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    parts = [
        f"coatcheck {version()} at {' and '.join(where(listener).url_by(scheme) for listener in listeners.public)}",
        _spoken_workers(settings),
        f"claims in {mask(settings.store.claims)}",
        f"replica {settings.store.replica}" + (f"-1 to -{processes}" if processes > 1 else ""),
        f"{files} open files" if files >= 0 else "open files without limit",
    ]
    if listeners.admin:
        parts.append(f"admin API at {where(listeners.admin[0]).url_by(scheme)}")
    log.info(", ".join(parts), extra=event("serving", version=version()))
    if not settings.access.token and not settings.admin_is_local:
        place = where([*listeners.admin, *listeners.public][0])
        log.warning("nobody may use the admin API: others can connect to %s, and admin-token is not set", place)


def _spoken_workers(settings: Settings) -> str:
    """How many are given, and where others come from."""
    workers = len(settings.workers.worker)
    sources = " and ".join(map(mask, settings.workers.workers_from))
    given = f"{workers} worker{'s' * (workers != 1)}"
    if settings.registers_only:
        return "workers that register at the claims"
    return given if not sources else f"workers from {sources}" if not workers else f"{given} and those from {sources}"


def _serve_as_child() -> int:
    """One of the supervisor's processes: `python -m app.serve [[FD...], [FD...]] FD FD`, the settings in the
    environment; from the last but one they come when they change, and the last leads to the parent's `Gathering`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent's to hear
    settings = Settings.load(os.environ[_SETTINGS_VARIABLE])
    configure_logging(settings)
    public, admin = ([socket.socket(fileno=fd) for fd in each] for each in json.loads(sys.argv[1]))
    passed = Passed(int(sys.argv[2]))
    replica = settings.store.replica
    try:
        with peer_listeners(settings) as peers:
            siblings = socket.socket(fileno=int(sys.argv[3]))
            siblings.setblocking(False)
            app = create_app(settings, peer_place=advertised(settings, peers), siblings=siblings)
            changes = functools.partial(passed.changes, replica)
            Server(app, settings, admin, peers, changes=changes, forceful=False).run(public)
    except Trouble as trouble:
        log.error("%s", trouble)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_serve_as_child())
