"""What the tests of session semantics stand in: replicas of the router, wired as in production, over one claim store of
any kind, in front of workers that note what reached them.

A request says by `x-test` how the worker is to answer: a status; `hold` (an event stream that goes on at its `go`);
`break` (a stream that is reset); `drop` (the connection is closed without an answer); `silent` (nothing comes);
`crash:NAME` (the worker of that name is gone without an answer).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import Settings
from app.main import Router, create_app
from app.serve import Server
from app.sessions.identity import KeyHasher
from app.sessions.tenants import new_key
from backends import open_store
from backends.base import Claim, ClaimStore, ClaimValue
from backends.memory import MemoryStore
from tests.support.bench import all_closed, at_rest
from tests.support.client import Call, Entrance
from tests.support.fakes import ScriptedStore
from tests.support.http_model import Request
from tests.support.raw import DONE, END, OK, STREAM, Peer, Worker, chunk, to_each, until

JSON = {"content-type": "application/json"}


class NotingWorker(Worker):
    """Notes the headers of each turn that reaches it in `turns`; one that comes twice as one list."""

    def __init__(self, name: str) -> None:
        super().__init__(to_each(self._serve))
        self.name = name
        self.models: list[str] = []
        """Its list, which it shows without noting that."""
        self.turns: list[dict[str, str]] = []
        self.go = asyncio.Event()

    async def _serve(self, peer: Peer, request: Request) -> None:
        if request.target == b"/v1/models":
            body = json.dumps({"data": [{"id": model} for model in self.models]}).encode()
            await peer.send(b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            return
        headers: dict[str, str] = {}
        for name, value in request.headers:
            earlier = headers.get(name.decode())
            headers[name.decode()] = value.decode() if earlier is None else f"{earlier}, {value.decode()}"
        self.turns.append(headers)
        match headers.get("x-test", "200"):
            case "hold":
                await peer.send(STREAM + chunk(b"data: a\n\n"))
                await self.go.wait()
                await peer.send(chunk(DONE) + END)
            case "break":
                await peer.send(STREAM + chunk(b"data: a\n\n"))
                peer.reset()
            case "drop":
                peer.close()
            case "silent":
                await peer.gone()
            case what if what.startswith("crash:"):
                if self.name in what.removeprefix("crash:").split(","):
                    await self.die()
                    peer.reset()
                else:
                    await peer.send(OK)
            case status:
                await peer.send(b"HTTP/1.1 %b X\r\ncontent-length: 2\r\n\r\n{}" % status.encode())


class Turn(Call):
    """One request to a replica, and what it was answered."""

    def said(self, name: str) -> str | None:
        value = self.headers.get(name.encode())
        return None if value is None else value.decode()

    @property
    def worker(self) -> str | None:
        return self.said("x-coatcheck-worker")

    @property
    def rank(self) -> str | None:
        return self.said("x-coatcheck-rank")

    @property
    def how(self) -> str | None:
        return self.said("x-coatcheck-affinity")

    @property
    def refusal(self) -> tuple[int, str]:
        """Status and code of an error of the router."""
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return self.status, error["code"]


class Room:
    """Replicas and workers; `self.truth` is a way of its own to the claims."""

    def __init__(self, truth: ClaimStore) -> None:
        self.truth = truth
        self.workers: list[NotingWorker] = []
        self.replicas: list[Router] = []
        self.entrances: list[Entrance] = []
        """Of the replicas, for their clients."""
        self.stores: list[ScriptedStore] = []
        self._fresh = itertools.count()

    def start(self, session: str | None = None, *, at: int = 0, final: bool = False, **how: Any) -> Turn:
        """Begin a turn at replica `at`. `headers`: more of them, `again`: such as are there already; `test`: what
        the worker is to do; `key`: the API key; `peer`: the address that it comes from; `host`: whom it asks; the rest
        as for Call."""
        headers: dict[str, str] = dict(how.pop("headers", {}))
        again: list[tuple[str, str]] = how.pop("again", [])
        if session is not None:
            headers["x-dynamo-session-id"] = session
        if final:
            headers["x-dynamo-session-final"] = "true"
        if "test" in how:
            headers["x-test"] = how.pop("test")
        if "key" in how:
            headers["authorization"] = f"Bearer {how.pop('key')}"
        pairs = [(name.lower().encode(), value.encode()) for name, value in (*headers.items(), *again)]
        return Turn(self.entrances[at], pairs, **({"host": "localhost"} | how)).start()

    async def turn(self, session: str | None = None, **how: Any) -> Turn:
        """A whole one."""
        turn = self.start(session, **how)
        await turn.finish()
        return turn

    async def held(self, session: str | None = None, **how: Any) -> Turn:
        """One that runs until its worker's `go`."""
        turn = self.start(session, test="hold", **how)
        await until(lambda: turn.body)
        return turn

    def new(self) -> str:
        """The id of a session that nobody has used."""
        return f"session-{next(self._fresh)}"

    def key(self, *session: str, tenant: str = "") -> str:
        return KeyHasher().key(tenant.encode(), *(part.encode() for part in session))

    async def claim(self, *session: str, tenant: str = "") -> Claim | None:
        return await self.truth.get(self.key(*session, tenant=tenant))

    async def mark(self, *session: str, tenant: str = "") -> tuple[int, str] | None:
        """What tells its claim from any other, and does not change while it stands."""
        claim = await self.claim(*session, tenant=tenant)
        return None if claim is None else (claim.revision, claim.value.nonce)

    async def stands(self, *session: str) -> bool:
        """In the eyes of any replica's store: their clocks may differ by a tick."""
        key = self.key(*session)
        return any([await store.get(key) for store in (self.truth, *self.stores)])

    async def until_closed(self, *session: str) -> None:
        async with asyncio.timeout(30):
            while await self.claim(*session) is not None:
                await asyncio.sleep(0.002)

    async def claim_at(self, worker: str, *session: str, rank: int | None = None) -> Claim:
        """Have a session claimed by somebody else, whatever was claimed before."""
        standing = await self.claim(*session)
        if standing is not None:
            await self.truth.close(standing)
        value = ClaimValue(worker=worker, rank=rank)
        outcome = await self.truth.create_or_get(self.key(*session), value, 600.0)
        assert outcome.created
        return outcome.claim

    def calls(self) -> Counter[str]:
        """Of the replicas, to the claim store."""
        return sum((store.calls for store in self.stores), Counter())

    @property
    def served(self) -> dict[str, list[dict[str, str]]]:
        """The turns of each worker: the truth."""
        return {worker.name: worker.turns for worker in self.workers}

    @property
    def served_count(self) -> int:
        return sum(map(len, self.served.values()))

    def worker(self, name: str | None) -> NotingWorker:
        return next(worker for worker in self.workers if worker.name == name)

    def release(self) -> None:
        """Let what is held go on."""
        for worker in self.workers:
            worker.go.set()

    @contextlib.asynccontextmanager
    async def admin(self, at: int = 0, *, peer: str = "127.0.0.1") -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.replicas[at], client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client

    async def rest(self) -> None:
        """Whatever happened, everything was given back."""
        for app in self.replicas:
            await at_rest(lambda app=app: app.turns.count, app.affinity, app.fleet)  # type: ignore[misc]
            await until(lambda app=app: not app.affinity.pending_closes)  # type: ignore[misc]


class Rooms:
    """Opens rooms over claims of one kind. `kind`: memory, file or etcd."""

    def __init__(self, kind: str, folder: Path, url: Callable[[str], str]) -> None:
        """`url`: the claims URL for a name that nobody has used."""
        self.kind, self._folder, self._url = kind, folder, url

    @contextlib.asynccontextmanager
    async def open(
        self,
        *,
        workers: int = 2,
        replicas: int = 2,
        dp: int = 0,
        deadline: float = 20.0,
        models: Sequence[Sequence[str]] = (),
        **settings: Any,
    ) -> AsyncIterator[Room]:
        """Workers w0, w1 ... with `dp` ranks each; `settings` as in the configuration, for every replica. `models`:
        what each worker lists, which is asked for then."""
        async with contextlib.AsyncExitStack() as stack:
            url = self._url(secrets.token_hex(6))
            memory = MemoryStore()
            stack.push_async_callback(memory.aclose)

            async def store() -> ClaimStore:
                if self.kind == "memory":
                    return memory
                opened = await open_store(url, deadline=deadline)
                stack.push_async_callback(opened.aclose)
                return opened

            room = Room(await store())
            for number in range(workers):
                room.workers.append(await stack.enter_async_context(NotingWorker(f"w{number}")))
            for each, names in zip(room.workers, models, strict=False):
                each.models = list(names)
            ranks = f",dp={dp}" if dp else ""
            spoken = tuple(f"http://127.0.0.1:{each.port},name={each.name}{ranks}" for each in room.workers)
            for number in range(replicas):
                scripted = ScriptedStore(await store(), stamps=True)
                values = {
                    "worker": spoken,
                    "claims": "memory://",
                    "replica": f"r{number}",
                    "probe_path": "off",
                    "models_interval": 30 if models else 0,
                    **settings,
                }
                made = Settings.flat(**values)
                app = create_app(made, store=scripted)
                await stack.enter_async_context(app.router.lifespan_context(app))
                room.replicas.append(app)
                room.entrances.append(Entrance(Server(app, made).config))
                stack.push_async_callback(room.entrances[-1].close)
                room.stores.append(scripted)
            for app in room.replicas:
                await until(lambda app=app: app.affinity.watching)  # type: ignore[misc]
            try:
                yield room
            finally:
                room.release()
            await room.rest()
        for app in room.replicas:
            await all_closed(app.fleet)

    def keys(self, *tenants: str) -> tuple[Path, list[str]]:
        """A file of API keys, and a key for each tenant."""
        made = [new_key(tenant) for tenant in tenants]
        file = self._folder / f"keys-{secrets.token_hex(4)}"
        file.write_text("".join(f"{line}\n" for _, line in made))
        return file, [key for key, _ in made]


Row = Callable[[Rooms], Awaitable[None]]
EVERY = ("memory", "file", "etcd")
ONE = ("memory",)
over_one = pytest.mark.parametrize("rooms", ONE, indirect=True)
"""For a test whose subject is no store's: what stores promise is shown of each by tests/stores/test_conformance.py."""


class Sentences(dict[str, Row]):
    """A table of sentences of the README, each with what shows that it is true:

    @says("A sentence.")
    async def _(rooms: Rooms) -> None: ...

    `over`: the claim stores that it is shown over; every one where replicas meet in the store, or it has to tell them
    something, so that what it can and cannot do might make a difference.
    """

    def __init__(self) -> None:
        super().__init__()
        self._over: dict[str, Sequence[str]] = {}

    def __call__(self, sentence: str, *, over: Sequence[str] = ONE) -> Callable[[Row], Row]:
        def note(row: Row) -> Row:
            assert sentence not in self, sentence
            self[sentence] = row
            self._over[sentence] = over
            return row

        return note

    @property
    def shown(self) -> pytest.MarkDecorator:
        """Parametrizes a test by `rooms` and `sentence`."""
        rows = [
            pytest.param(kind, sentence, id=f"{kind}-{_id(sentence)}")
            for kind in EVERY
            for sentence in self
            if kind in self._over[sentence]
        ]
        return pytest.mark.parametrize(("rooms", "sentence"), rows, indirect=["rooms"])


def _id(sentence: str) -> str:
    words = ("".join(c for c in word if c.isalnum()) for word in sentence.lower().split())
    return "-".join(itertools.islice(filter(None, words), 9))
