"""A fleet with phases in the test's own loop: mock workers that prefill and that decode, and replicas before them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from app.config import Settings
from app.main import Router, create_app
from app.serve import Server
from app.sessions.identity import KeyHasher
from backends.base import ClaimStore
from backends.memory import MemoryStore
from mocker import cli
from mocker.server import MockWorker, create_mock
from mocker.settings import MockSettings
from mocker.wire import Ask
from tests.support.bench import at_rest
from tests.support.client import Call, Entrance
from tests.support.fakes import ScriptedStore
from tests.support.raw import until
from tests.support.wire import ask

LONG = "word " * 400


class Mock:
    """A mock worker, and how it is stopped."""

    def __init__(self, **settings: Any) -> None:
        self.name = settings["name"]
        self.phase = settings["phase"]
        self._listener = cli.listen("127.0.0.1", 0)
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self._app: MockWorker = create_mock(MockSettings(**{"ttft_ms": 1, "itl_ms": 1, "tokens": 3, **settings}))
        self.spec = f"{self.url},name={self.name},phase={self.phase}"
        if self._app.bootstrap_port:
            self.spec += f",handover=sglang,bootstrap-port={self._app.bootstrap_port}"
        self._stop = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(cli.serve([(self._app, self._listener)], self._stop))
        await until(lambda: self._listener.fileno() < 0 or self._app.running_turns == 0)
        assert (await ask(self.url, target="/health")).status == 200

    async def stop(self) -> None:
        """Nobody listens there any more when this returns."""
        self._stop.set()
        if self._serving is not None:
            await self._serving
            self._serving = None
            self._app.close()

    def tap(self, seen: list[bytes]) -> None:
        service = self._app.turns
        for path, api in list(service.apis.items()):

            def parse(body: bytes, inner: Callable[[bytes], Ask] = api.parse) -> Ask:
                seen.append(body)
                return inner(body)

            service.apis[path] = dataclasses.replace(api, parse=parse)

    async def fault(self, **fault: Any) -> None:
        answer = await ask(self.url, "POST", "/mock/faults", body=json.dumps(fault).encode())
        assert answer.status == 200, answer.body

    async def turns(self) -> list[dict[str, Any]]:
        return (await ask(self.url, target="/mock/turns")).json["turns"]  # type: ignore[no-any-return]

    async def state(self) -> dict[str, Any]:
        return (await ask(self.url, target="/mock/state")).json  # type: ignore[no-any-return]


class Phased:
    """Replicas over one store, and the workers. `store` is the replicas' way to the claims."""

    def __init__(self) -> None:
        self.mocks: dict[str, Mock] = {}
        self.replicas: list[Router] = []
        self.entrances: list[Entrance] = []
        self.stores: list[ScriptedStore] = []
        self.truth: ClaimStore = MemoryStore()

    def start(
        self,
        session: str | None = None,
        *,
        at: int = 0,
        headers: Sequence[tuple[str, str]] = (),
        path: str = "/v1/chat/completions",
        text: str = LONG,
        **request: Any,
    ) -> Call:
        pairs = [("content-type", "application/json"), *headers]
        if session is not None:
            pairs.append(("x-dynamo-session-id", session))
        body = {"model": "mock-model", "messages": [{"role": "user", "content": text}], **request}
        raw = [(name.encode(), value.encode()) for name, value in pairs]
        return Call(self.entrances[at], raw, path=path, host="localhost", body=json.dumps(body).encode()).start()

    async def turn(self, session: str | None = None, **how: Any) -> Call:
        """A whole one."""
        return await self.start(session, **how).finish()

    async def served(self) -> dict[str, list[str | None]]:
        """By worker, what became of the blocks of each of its turns."""
        return {name: [turn["handover"] for turn in await mock.turns()] for name, mock in self.mocks.items()}

    async def stranded(self) -> int:
        """What was kept, or waited for, in vain."""
        return sum([(await mock.state()).get("expired", 0) for mock in self.mocks.values()])

    async def staged(self) -> int:
        states = [await mock.state() for mock in self.mocks.values() if mock.phase != "both"]
        return sum(state["staged_blocks"] for state in states)

    async def free(self) -> bool:
        return not await self.staged()

    async def active(self, name: str) -> bool:
        return bool((await self.mocks[name].state())["active"])

    async def active_one(self, phase: str) -> str | None:
        """The name of a worker that has a turn, of those whose name begins so."""
        for name in self.mocks:
            if name.startswith(phase) and await self.active(name):
                return name
        return None

    async def idle(self, name: str) -> bool:
        return not await self.active(name)

    async def served_as(self, expected: dict[str, list[str | None]]) -> bool:
        return await self.served() == expected

    def tap(self, name: str, seen: list[bytes]) -> None:
        """Note the bodies of the turns that reach a worker."""
        self.mocks[name].tap(seen)

    def counted(self, name: str, at: int = 0) -> dict[tuple[str, ...], int]:
        """The cells of a metric that are not 0."""
        return {labels: count for labels, count in getattr(self.replicas[at].metrics, name).cells.items() if count}

    def key(self, *session: str) -> str:
        return KeyHasher().key(b"", *(part.encode() for part in session))

    async def claimed(self, *session: str) -> str | None:
        claim = await self.truth.get(self.key(*session))
        return None if claim is None else claim.value.worker

    async def rest(self) -> None:
        for app in self.replicas:
            await at_rest(lambda app=app: app.turns.count, app.affinity, app.fleet)  # type: ignore[misc]
            await until(lambda app=app: not app.affinity.pending_closes)  # type: ignore[misc]
            await until(lambda app=app: not len(app.phases.releases))  # type: ignore[misc]


def said(call: Call, name: str) -> str | None:
    value = call.headers.get(name.encode())
    return None if value is None else value.decode()


def places(call: Call) -> tuple[str | None, str | None]:
    """Where it was prefilled, and where it was decoded."""
    return said(call, "x-coatcheck-prefill-worker"), said(call, "x-coatcheck-worker")


@contextlib.asynccontextmanager
async def phased(
    *,
    prefill: int = 2,
    decode: int = 2,
    both: int = 0,
    replicas: int = 2,
    dp: int = 0,
    mock: dict[str, Any] | None = None,
    models: dict[str, tuple[str, ...]] | None = None,
    more: tuple[str, ...] = (),
    **settings: Any,
) -> AsyncIterator[Phased]:
    """Workers p0, p1 …, d0, d1 …, b0 …; `mock`: more of their settings; `models`: what each serves by its name, which
    is asked for then; `more`: workers of another fleet; `settings`: of each replica."""
    room = Phased()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(room.truth.aclose)
        for phase, count in (("prefill", prefill), ("decode", decode), ("both", both)):
            for number in range(count):
                name = f"{phase[0]}{number}"
                serves = {} if models is None else {"models": models[name]}
                made = Mock(**{"name": name, "phase": phase, "dp_size": dp or 1, **serves, **(mock or {})})
                room.mocks[made.name] = made
                stack.push_async_callback(made.stop)
                await made.start()
        ranks = f",dp={dp}" if dp else ""
        named = (*(each.spec + ranks for each in room.mocks.values()), *more)
        for number in range(replicas):
            store = ScriptedStore(room.truth, stamps=True)
            values: dict[str, Any] = {"claims": "memory://", "replica": f"r{number}", "probe_path": "off"}
            values["models_interval"] = 0 if models is None else 30
            made_settings = Settings.flat(**{"worker": named, "prefill_from": 0, **values, **settings})
            app = create_app(made_settings, store=store)
            await stack.enter_async_context(app.router.lifespan_context(app))
            room.replicas.append(app)
            room.entrances.append(Entrance(Server(app, made_settings).config))
            stack.push_async_callback(room.entrances[-1].close)
            room.stores.append(store)
        for app in room.replicas:
            await until(lambda app=app: app.affinity.watching)  # type: ignore[misc]
        yield room
        await room.rest()
