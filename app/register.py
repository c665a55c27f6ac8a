"""`coatcheck register`: a sidecar that keeps a worker's record alive where routers find it (`workers/` in the registry
at a claims URL), beside an engine that cannot be changed; and the same for mock workers, beside them in their process.

The record is made when the engine answers its health check, and put again every third of its TTL: one that was lost,
because its owner was frozen for longer than that, is there again within that time. Who cannot be connected to is not
put again, and the record ends. On SIGTERM it says that the worker is draining: no router places anything there any
more, its sessions move after half of `drain`, and when the engine has nothing left to do, or `drain` is over, the
record is removed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import enum
import logging
import re
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import httpx
import msgspec

from app import Trouble, logs
from app.fleet.discovery.records import (
    WORKERS,
    WorkerRecord,
    check_reachable,
    decode_record,
    encode_record,
    this_host,
)
from app.fleet.specs import (
    BOOTSTRAP_PORT,
    WorkerError,
    checked_name,
    checked_place,
    checked_port,
    normal_url,
    worker_name,
)
from app.making import open_claims_at
from app.sessions.tenants import checked_key, read_key
from app.values import mask
from backends.base import StoreConfigurationError, StoreError
from backends.registry import Registry
from mocker.server import MockWorker

log = logging.getLogger("coatcheck.register")

_ANSWER_WITHIN = 5.0
"""Seconds that the engine has to answer."""
_STORE_DEADLINE = 2.0
_LOOK_EVERY = 0.5
"""Seconds between looks whether a draining engine has anything left to do."""
_QUIET_LOOKS = 2
"""Of these in a row: a turn may be on its way between two."""
_HEARD_WITHIN = 2.5
"""Seconds in which every router has heard that it is draining; what is removed earlier looks like a loss."""
_MOST_BYTES = 4 << 20
_MOCK_DRAIN = 4.0
_BUSY = re.compile(
    r"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs"
    r"|llamacpp:requests_(?:processing|deferred))(?:\{[^}]*\})? ([0-9.eE+-]+)",
    re.MULTILINE,
)
"""What engines count of their work, in their metrics."""
_STARTED = re.compile(r"^process_start_time_seconds ([0-9.eE+-]+)", re.MULTILINE)


class Sign(enum.Enum):
    """How the engine answers its health check."""

    WELL = "it is well"
    ILL = "it does not answer its health check"
    GONE = "it cannot be connected to"


class Engine:
    """The worker's own word."""

    def __init__(self, url: str, *, key: str = "") -> None:
        self._url = url
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # The environment's proxies are for the internet.
        self._client = httpx.AsyncClient(trust_env=False, timeout=_ANSWER_WITHIN, headers=headers)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def look(self) -> Sign:
        try:
            async with asyncio.timeout(_ANSWER_WITHIN):
                return Sign.WELL if (await self._client.get(f"{self._url}/health")).is_success else Sign.ILL
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return Sign.GONE
        except (httpx.HTTPError, TimeoutError):
            return Sign.ILL

    async def models(self) -> tuple[str, ...] | None:
        """What it serves; None: it does not say."""
        text = await self._text("/v1/models")
        with contextlib.suppress(ValueError):
            if text is not None:
                return tuple(each.id for each in msgspec.json.decode(text, type=_Models).data)
        return None

    async def busy(self) -> bool | None:
        """Whether it has turns; None: it does not say."""
        counts = _BUSY.findall(await self._text("/metrics") or "")
        return any(float(count) for count in counts) if counts else None

    async def started(self) -> str:
        """When its process did, where its metrics say so."""
        found = _STARTED.search(await self._text("/metrics") or "")
        return f"{float(found[1]):.2f}" if found else ""

    async def _text(self, path: str) -> str | None:
        body = bytearray()
        try:
            async with asyncio.timeout(_ANSWER_WITHIN), self._client.stream("GET", self._url + path) as answer:
                if not answer.is_success:
                    return None
                async for piece in answer.aiter_bytes():
                    body += piece
                    if len(body) > _MOST_BYTES:
                        return None
        except (httpx.HTTPError, TimeoutError):
            return None
        return body.decode("utf-8", "replace")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Registration:
    """One worker's record, from the engine's first good sign to its end."""

    def __init__(
        self,
        registry: Registry,
        name: str,
        record: WorkerRecord,
        engine: Engine,
        *,
        ttl: float,
        drain: float,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`record`: what is known from the start; an `incarnation` in it is the engine's, else one is made whenever it
        has begun anew. `ttl` and `drain` in seconds."""
        self._registry, self._name, self._record, self._engine = registry, name, record, engine
        self._ttl, self._drain, self._wall, self._clock = ttl, drain, wall, clock
        self._incarnation = record.incarnation
        self._fixed = bool(record.incarnation)
        self._stands = False
        self._sign: Sign | None = None
        self._trouble = ""

    async def keep(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Until `stop`, and then through the drain, which `hurry` ends. Raises nothing that a router or the store could
        cause."""
        await self._adopt()
        while not stop.is_set():
            sign = await self._engine.look()
            if sign is not self._sign:
                log.info("%s: %s", self._record.url, sign.value)
            if sign is Sign.GONE and not self._fixed:
                self._incarnation = ""  # whoever comes back has an empty cache
            self._sign = sign
            # One that is ill stays registered: what that means is for the routers to decide, who see its answers.
            if sign is Sign.WELL or (sign is Sign.ILL and self._stands):
                await self._describe(sign)
                await self._put()
            await _either(stop, timeout=self._ttl / 3)
        if self._stands:
            await self._leave(hurry)

    async def _adopt(self) -> None:
        """A record that stands is this sidecar's own, from before it was started again: the engine may have its cache
        still, if it is well at once."""
        if self._fixed:
            return
        with contextlib.suppress(StoreError, ValueError):
            found = (await self._registry.list(WORKERS)).get(self._name)
            record = decode_record(found) if found is not None else None
            same = record is not None and record.url == self._record.url
            if record is not None and same and await self._engine.look() is Sign.WELL:
                self._incarnation = record.incarnation

    async def _describe(self, sign: Sign) -> None:
        models = self._record.models
        if sign is Sign.WELL:
            models = await self._engine.models() or models
            if not self._fixed:
                self._incarnation = await self._engine.started() or self._incarnation or secrets.token_hex(6)
        self._record = msgspec.structs.replace(self._record, models=models, incarnation=self._incarnation)

    async def _put(self) -> bool:
        try:
            await self._registry.put(WORKERS, self._name, encode_record(self._record), self._ttl)
        except StoreError as error:
            if not self._trouble:
                log.warning("%s cannot be registered (%s); it is tried again", self._name, mask(str(error)))
            self._trouble = str(error)
            return False
        if self._trouble or not self._stands:
            log.info("%s is registered, at %s", self._name, self._record.url)
        self._trouble, self._stands = "", True
        return True

    async def _leave(self, hurry: asyncio.Event) -> None:
        heard_at, ends_at = self._clock() + _HEARD_WITHIN, self._clock() + self._drain
        until = self._wall() + self._drain / 2
        self._record = msgspec.structs.replace(self._record, draining=True, until=until)
        log.info("%s is draining, for at most %g s", self._name, self._drain)
        again_at = quiet = 0.0
        while not hurry.is_set() and self._clock() < ends_at:
            if self._clock() >= again_at and await self._put():
                again_at = self._clock() + self._ttl / 3
            quiet = quiet + 1 if await self._engine.busy() is False else 0
            if quiet >= _QUIET_LOOKS and self._clock() >= heard_at:
                break
            await _either(hurry, timeout=min(_LOOK_EVERY, max(0.0, ends_at - self._clock())))
        try:
            await self._registry.remove(WORKERS, self._name)
        except StoreError as error:
            log.warning("%s could not be removed (%s); its record ends by itself", self._name, mask(str(error)))
        else:
            log.info("%s is removed", self._name)


async def _either(event: asyncio.Event, *, timeout: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()


# --- the command -----------------------------------------------------------------------------------------------------


def record_of(args: argparse.Namespace, url: str) -> WorkerRecord:
    """What is said of the worker at `url`. Raises WorkerError."""
    return WorkerRecord(
        url=url,
        ranks=args.dp,
        phase=args.phase,
        handover=args.handover,
        bootstrap_port=checked_port(args.bootstrap_port),
        kv_events=checked_place(args.kv_events) if args.kv_events else "",
        kv_replay=checked_place(args.kv_replay) if args.kv_replay else "",
        labels=dict(args.label),
        host=this_host(),
    )


def run(args: argparse.Namespace) -> int:
    """Until SIGTERM or SIGINT, and through the drain. Returns the exit code. Raises Trouble."""
    logs.set_up("info")
    try:
        url = normal_url(args.worker_url)
        check_reachable(url, from_here=True)
        name = checked_name(args.name or worker_name(url))
        record = record_of(args, url)
        asked = normal_url(args.ask or url)
        key = read_key(args.worker_api_key_file) if args.worker_api_key_file else ""
    except (WorkerError, ValueError) as error:
        raise Trouble(str(error), code=2) from None
    except OSError as error:
        raise Trouble(f"--worker-api-key-file {args.worker_api_key_file}: {error.strerror}", code=2) from None
    try:
        asyncio.run(_until_stopped(args.to, name, record, asked, checked_key(key) if key else "", args))
    except StoreConfigurationError as error:
        raise Trouble(f"--to {mask(args.to)}: {mask(str(error))}", code=2) from None
    return 0


async def _until_stopped(
    to: str, name: str, record: WorkerRecord, asked: str, key: str, args: argparse.Namespace
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told)
    store = await open_claims_at(to, deadline=_STORE_DEADLINE)
    engine = Engine(asked, key=key)
    try:
        registration = Registration(store.registry, name, record, engine, ttl=args.ttl, drain=args.drain)
        await registration.keep(stop, hurry)
    finally:
        await engine.aclose()
        await store.aclose()


# --- beside mock workers ---------------------------------------------------------------------------------------------


Mocks = Sequence[tuple[MockWorker, str]]
"""Each with its URL."""


def beside_mocks(args: argparse.Namespace) -> Callable[[Mocks], AbstractAsyncContextManager[None]]:
    """What `mocker.cli.run` has beside its workers with `--register`."""

    @contextlib.asynccontextmanager
    async def registered(workers: Mocks) -> AsyncIterator[None]:
        try:
            store = await open_claims_at(args.register, deadline=_STORE_DEADLINE)
        except StoreConfigurationError as error:
            raise Trouble(f"--register {mask(args.register)}: {mask(str(error))}", code=2) from None
        stop, hurry = asyncio.Event(), asyncio.Event()
        engines = [_MockEngine(worker, url, key=worker.settings.api_key or "") for worker, url in workers]
        registrations = [
            Registration(
                store.registry,
                engine.worker.settings.name,
                WorkerRecord(
                    url=url,
                    ranks=engine.worker.settings.dp_size if engine.worker.settings.dp_size > 1 else 0,
                    phase=engine.worker.settings.phase,
                    handover=engine.worker.settings.transfer.handover,
                    bootstrap_port=engine.worker.bootstrap_port or BOOTSTRAP_PORT,
                    incarnation=secrets.token_hex(6),
                    host=this_host(),
                ),
                engine,
                ttl=args.register_ttl,
                drain=_MOCK_DRAIN,
            )
            for engine, (_, url) in zip(engines, workers, strict=True)
        ]
        async with asyncio.TaskGroup() as group:
            for each in registrations:
                group.create_task(each.keep(stop, hurry))
            try:
                yield
            finally:
                stop.set()
        for engine in engines:
            await engine.aclose()
        await store.aclose()

    return registered


class _MockEngine(Engine):
    """A mock worker of this process: it need not be asked whether it has turns."""

    def __init__(self, worker: MockWorker, url: str, *, key: str) -> None:
        super().__init__(url, key=key)
        self.worker = worker

    async def busy(self) -> bool | None:
        return self.worker.running_turns > 0


# --- what options may be ---------------------------------------------------------------------------------------------
