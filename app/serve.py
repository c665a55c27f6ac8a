"""Running the router: the listening sockets, uvicorn, signals, and the processes of `--processes N`.

On a first SIGTERM or SIGINT `/ready` fails while turns are still taken; after `drain_delay` the port closes and running
turns get `drain_timeout` to end. A second signal exits at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

import uvicorn

from app import Trouble, children, version
from app.config import Settings, mask
from app.http.client import ClientLimits, client_protocol
from app.main import Router, create_app

log = logging.getLogger("coatcheck")

_SETTINGS_VARIABLE = "COATCHECK_EFFECTIVE_SETTINGS"
"""How the processes of `--processes N` get the settings that were read and checked once."""
_BACKLOG = 4096
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_KEPT_BYTES = 16 * 1024 * 1024
_STOP_MARGIN = 5.0
"""Seconds that a process gets beyond its drain limits before it is killed."""
_SHORT_LIFE = 1.0
"""A process that lived shorter than this, in seconds, is replaced only after such a pause."""


def serve(settings: Settings) -> int:
    """Serve until a signal, with logging configured. Answers the exit code. Raises Trouble where it cannot listen."""
    try:
        sockets = listen(settings.listen.host, settings.listen.port)
    except OSError as error:
        remedy = "free it or choose another --port" if error.errno == errno.EADDRINUSE else "choose another --host"
        where = f"{settings.listen.host}:{settings.listen.port}"
        raise Trouble(f"cannot listen on {where}: {error.strerror}; {remedy}") from None
    with contextlib.ExitStack() as stack:
        for listener in sockets:
            stack.enter_context(contextlib.closing(listener))
        if settings.listen.processes > 1:
            return _Supervisor(settings, sockets).run()
        Server(create_app(settings), settings, announcement=_announcement(settings, sockets)).run(sockets)
    return 0


def listen(host: str, port: int) -> list[socket.socket]:
    """Bound sockets for every address that `host` means, all with one port. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    absent = None
    for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
        shared_port = sockets[0].getsockname()[1] if sockets else port
        try:
            listener = socket.create_server(
                (address[0], shared_port, *address[2:]),
                family=family,
                backlog=_BACKLOG,
            )
        except OSError as error:
            failure = OSError(error.errno, os.strerror(error.errno or errno.EIO))
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                absent = failure  # a name may have an address of a family that this machine does not use
                continue
            for bound in sockets:
                bound.close()
            raise failure from error
        sockets.append(listener)
    if not sockets:
        raise absent or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return sockets


def configure_logging(level: str) -> None:
    """Everything to stderr; other libraries' small talk left out."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    for name in ("httpx", "httpcore", "watchfiles", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.INFO if level == "debug" else logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Not for what uvicorn calls an error and we do on purpose."""
    # A turn was still running when its time at shutdown was over; uvicorn has said how many those were.
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class Server(uvicorn.Server):
    """One router process on sockets that are already bound.

    `forceful`: a second signal ends it at once. Children of a supervisor are not: what stops a whole group of processes
    reaches them twice, directly and from their parent, and the parent has its own limits.
    """

    def __init__(self, router: Router, settings: Settings, *, announcement: str = "", forceful: bool = True) -> None:
        super().__init__(
            uvicorn.Config(
                router,
                loop="uvloop",
                http=client_protocol(
                    router.proxy_of,
                    lambda: router.draining,
                    ClientLimits(
                        head_bytes=settings.limits.max_header_bytes,
                        head_wait=settings.limits.client_head_timeout,
                        body_wait=settings.limits.client_body_timeout,
                        idle=settings.listen.keepalive_timeout,
                    ),
                    router.origins,
                ),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=settings.process.drain_timeout,
            )
        )
        self._router = router
        self._drain_delay = settings.process.drain_delay
        self._announcement = announcement
        self._forceful = forceful
        self._exit_at: float | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        _keep_freed_memory()
        super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._announcement:
            log.info(self._announcement)

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
        if self._exit_at is not None and time.monotonic() >= self._exit_at:
            self.should_exit = True
        return await super().on_tick(counter)


def _keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next large body instead of giving it back to the system, and having every
    page of it cleared again: a third of the cost of a body of 400 kB. Elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            libc.mallopt(parameter, _KEPT_BYTES)


class _Supervisor:
    """The parent of `--processes N`: starts them on its sockets, replaces those that die, stops them together."""

    def __init__(self, settings: Settings, sockets: list[socket.socket]) -> None:
        self._settings = settings
        self._sockets = sockets
        self._numbers = itertools.count(1)
        self._running: dict[subprocess.Popen[bytes], float] = {}
        self._signals = 0

    def run(self) -> int:
        """Until a signal, or until a process cannot start. Answers the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            for _ in range(self._settings.listen.processes):
                self._start()
            log.info(_announcement(self._settings, self._sockets))
            while not self._signals:
                time.sleep(0.1)
                for child in [child for child in self._running if child.poll() is not None]:
                    if self._signals:
                        break
                    lived = time.monotonic() - self._running.pop(child)
                    children.stop([child], grace=0)
                    if child.returncode > 0:
                        # It gave up by itself, as they do when they cannot start. The next one would do the same.
                        log.error("process %d ended with exit code %d; all are stopped", child.pid, child.returncode)
                        return 1
                    ended = children.spoken_end(child.returncode)
                    log.error("process %d %s; another one takes its place", child.pid, ended)
                    if lived < _SHORT_LIFE:
                        time.sleep(_SHORT_LIFE)
                    self._start()
            return 0
        finally:
            for listener in self._sockets:
                listener.close()  # the processes have their own; in ours connections would wait for nobody
            drain = self._settings.process.drain_delay + self._settings.process.drain_timeout
            children.stop(self._running, grace=drain + _STOP_MARGIN, hurried=lambda: self._signals > 1)

    def _start(self) -> None:
        replica = f"{self._settings.store.replica}-{next(self._numbers)}"
        store = self._settings.store.model_copy(update={"replica": replica})
        environment = os.environ | {_SETTINGS_VARIABLE: self._settings.model_copy(update={"store": store}).dump()}
        descriptors = [listener.fileno() for listener in self._sockets]
        child = children.start("app.serve", *map(str, descriptors), environment=environment, pass_fds=descriptors)
        self._running[child] = time.monotonic()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def _announcement(settings: Settings, sockets: list[socket.socket]) -> str:
    host, port = sockets[0].getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    workers, processes = len(settings.workers.worker), settings.listen.processes
    parts = [
        f"coatcheck {version()} at http://{address}",
        f"{workers} worker{'s' * (workers != 1)}",
        f"claims in {mask(settings.store.claims)}",
        f"replica {settings.store.replica}" + (f"-1 to -{processes}" if processes > 1 else ""),
    ]
    return ", ".join(parts)


def _serve_as_child() -> int:
    """One of the supervisor's processes: `python -m app.serve FD...`, the settings in the environment."""
    settings = Settings.load(os.environ[_SETTINGS_VARIABLE])
    configure_logging(settings.process.log_level)
    sockets = [socket.socket(fileno=int(text)) for text in sys.argv[1:]]
    Server(create_app(settings), settings, forceful=False).run(sockets)
    return 0


if __name__ == "__main__":
    sys.exit(_serve_as_child())
