"""The peers' channel over real sockets: what is asked and answered, who is let in, and what a peer that is slow, gone
or strange costs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from app.errors import TurnError
from app.fleet.health import Word
from app.fleet.naming import Naming, Spot
from app.fleet.policies import least, rendezvous
from app.http.client import client_protocol
from app.sessions.claims import StoreState
from app.sessions.door import Door
from app.sessions.endings import Ending
from app.sessions.peers import Ask, Known, Patience, Peer, Peers
from backends.base import ClaimValue
from backends.memory import MemoryStore
from tests.support.fakes import ScriptedStore
from tests.support.raw import until
from tests.support.replicas import KEY, Replica, first_of, key_of
from tests.support.wire import ask

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's


class Desk:
    """Answers as it is told, and notes what it was asked."""

    def __init__(self) -> None:
        self.state = "up"
        self.known: Known | None = Known()
        self.bound: Known | None = None
        self.refusal: TurnError | None = None
        self.asked: list[tuple[str, str]] = []
        self.bound_for: list[Ask] = []
        self.go = asyncio.Event()
        self.go.set()

    def where(self, ask: Ask) -> Known | None:
        self.asked.append(("where", ask.key))
        return self.known

    def closed(self, ask: Ask) -> None:
        self.asked.append(("closed", ask.key))

    def ended(self, ask: Ask) -> None:
        self.asked.append(("ended", ask.key))

    def moved(self, ask: Ask) -> None:
        self.asked.append(("moved", ask.key))

    def health(self, ask: Ask) -> None:
        self.asked.append(("health", ask.said))

    async def bind(self, ask: Ask) -> Known | None:
        self.asked.append(("bind", ask.key))
        self.bound_for.append(ask)
        await self.go.wait()
        if self.refusal is not None:
            raise self.refusal
        return self.bound

    async def close(self, ask: Ask) -> Known | None:
        self.asked.append(("close", ask.key))
        return Known(how="closed")


class Other:
    """A peer: its desk behind its door."""

    def __init__(self, token: str = "a-token") -> None:
        self.desk: Any = Desk()
        self.door = Door(token, lambda: self.desk)
        self.connections = 0
        self._state = ServerState()

    async def open(self) -> None:
        config = uvicorn.Config(_nobody, http=client_protocol(lambda path: self.door), lifespan="off")
        config.load()

        def made() -> asyncio.Protocol:
            self.connections += 1
            protocol: Any = config.http_protocol_class
            return cast(asyncio.Protocol, protocol(config=config, server_state=self._state, app_state={}))

        self._server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def peer(self, token: str = "a-token") -> Peer:
        return Peer("other", f"life at {self.port}", "127.0.0.1", self.port, token, "up")

    async def shut(self) -> None:
        self._server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        await until(lambda: not self._state.connections)


async def _nobody(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nothing comes here")


@pytest.fixture
async def other() -> AsyncIterator[Other]:
    other = Other()
    await other.open()
    yield other
    await other.shut()


@pytest.fixture
async def here() -> AsyncIterator[Replica]:
    store = MemoryStore()
    yield Replica(store)
    await store.aclose()


@pytest.fixture
async def peers(here: Replica, other: Other) -> AsyncIterator[Peers]:
    peers = Peers("here", Naming(here.fleet), here.metrics, patience=UNHURRIED)
    peers.update([other.peer()])
    yield peers
    peers.close()


def spot(here: Replica, worker: str) -> Any:
    return Naming(here.fleet).spot(here.target(worker))


WHERE = Ask("bind", KEY)


UNHURRIED = Patience(where=5.0, closed=5.0, store=5.0)
"""What is tested here is what is said, not how soon."""


async def test_what_a_peer_has_proven_is_taken(here: Replica, other: Other, peers: Peers) -> None:
    other.desk.known = Known(spot(here, "b"), ClaimValue(worker="b"), 7, True)
    found = await peers.find(WHERE)
    assert found is not None
    told, target = found
    claim = told.claim(KEY)
    assert target is here.target("b")
    assert claim is not None
    assert (claim.revision, claim.value.worker) == (7, "b")
    assert other.desk.asked == [("where", KEY)]


async def test_what_nobody_knows_is_bound_by_one_that_has_the_store(here: Replica, other: Other, peers: Peers) -> None:
    other.desk.bound = Known(spot(here, "c"), ClaimValue(worker="c"), 8, True, how="created")
    found = await peers.find(WHERE)
    assert found is not None
    assert (found[0].how, found[1]) == ("created", here.target("c"))
    other.desk.state = "away"
    await peers.tell("closed", KEY, 8)
    assert not peers.any_up
    assert await peers.find(WHERE) is None


async def test_what_is_said_to_one_peer_at_once_goes_together(other: Other, peers: Peers) -> None:
    await asyncio.gather(*(peers.tell("closed", f"{number:040x}", number) for number in range(500)))
    assert sorted(key for _, key in other.desk.asked) == [f"{number:040x}" for number in range(500)]
    assert other.connections == 1


async def test_news_of_what_a_peer_does_not_know_are_passed_over(other: Other, peers: Peers) -> None:
    """It may be of another version."""
    await peers.tell("something new", KEY, 1)
    assert not other.desk.asked
    assert await peers.close_for_us(Ending(KEY, 0.0), 1) == "closed"


async def test_a_peer_that_hangs_costs_a_moment_and_then_nothing(here: Replica) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and nobody reads
        peers = Peers("here", Naming(here.fleet), here.metrics)
        peers.update([Peer("other", "life", "127.0.0.1", silent.getsockname()[1], "a-token", "up")])
        began = time.monotonic()
        assert await peers.find(WHERE) is None
        first = time.monotonic() - began
        for _ in range(150):  # 0.15 s each for one that is asked and told
            assert await peers.find(WHERE) is None
            await peers.tell("closed", KEY, 1)
        assert first < 10
        assert time.monotonic() - began - first < 10, "it is left out for a while"
        peers.close()


async def test_a_peer_that_is_busy_is_waited_for_and_one_that_has_gone_in_silence_once(here: Replica) -> None:
    other = Other()
    await other.open()
    hangs, patience = asyncio.Event(), Patience(where=0.01, late=2.0)

    other.desk.known = Known(spot(here, "b"), ClaimValue(worker="b"), 7, True)
    async with late(other.port, 0.1, hangs) as port:
        peers = Peers("here", Naming(here.fleet), here.metrics, patience=patience)
        peers.update([Peer("other", "life", "127.0.0.1", port, "a-token", "up")])
        for _ in range(3):
            assert await peers.find(WHERE) is not None, "ten times as long as one that has gone is given"
        hangs.set()
        assert await peers.find(WHERE) is None
        assert here.metrics.peer_calls.cells["where", "late"] == 1
        assert not peers.any_up, "it is left out"
        hangs.clear()
        # What it was asked is answered late, and tells that it is there; it is asked again after a while in any case.
        await until(lambda: peers._links["life"].answers)
        assert await peers.find(WHERE) is not None
        peers.close()
    await other.shut()


async def test_news_reaches_a_peer_that_is_busy(here: Replica) -> None:
    """Those who tell it go on; it is not lost for that."""
    other = Other()
    await other.open()
    hangs = asyncio.Event()
    hangs.set()
    async with late(other.port, 0.01, hangs) as port:
        peers = Peers("here", Naming(here.fleet), here.metrics, patience=Patience(closed=0.001, late=5.0))
        peers.update([Peer("other", "life", "127.0.0.1", port, "a-token", "up")])
        for number in range(3):
            await peers.tell("moved", f"{number:040x}", 1)
        assert not other.desk.asked
        hangs.clear()
        await until(lambda: len(other.desk.asked) == 3)
        peers.close()
    await other.shut()


async def test_a_worker_that_one_replica_has_found_sick_costs_the_others_one_turn(other: Other, peers: Peers) -> None:
    """And none where new ones have room elsewhere."""
    mine, theirs = both = Replica(MemoryStore()), Replica(MemoryStore(), name="r2")
    other.desk = theirs.affinity.desk
    mine.fleet.tell = peers.say
    sick, there = (each.target("a").worker for each in both)
    for _ in range(sick.health.tolerance.failures):
        sick.health.failed("status 500")
    assert sick.state == "suspect"
    await until(lambda: there.health.burden.any)  # what is said at once comes at once
    assert there.state == "up"
    assert least(list(theirs.fleet.candidates())).worker is not there
    there.health.failed("status 500")
    assert there.state == "suspect"
    peers.say(theirs.target("c").worker, Word.WELL)  # of one that nobody suspects
    for replica in both:
        await replica.store.aclose()


async def test_what_a_peer_says_of_a_worker_is_of_who_is_at_its_address(here: Replica) -> None:
    a, b = (here.target(name).worker for name in "ab")
    for spot in (Spot("a", "http://elsewhere:1"), Spot("a", "http://b:1"), Spot("a", "http://b:1", rank=3, ranks=4)):
        here.affinity.desk.health(Ask("health", "", at=(spot,), said="sick"))
    assert not a.health.burden.any
    b.health.failed("status 500")
    assert (a.state, b.state) == ("up", "suspect")


@contextlib.asynccontextmanager
async def late(port: int, seconds: float, hangs: asyncio.Event) -> AsyncIterator[int]:
    """A way to `port` by which what is asked takes so long, and while it hangs, until it does no more."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if slow:
                    await asyncio.sleep(seconds)
                    while hangs.is_set():
                        await asyncio.sleep(0.01)
                writer.write(data)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        current = asyncio.current_task()
        assert current is not None
        running.append(current)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, back, True), carry(there, writer, False))

    running: list[asyncio.Task[Any]] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await until(lambda: all(task.done() for task in running))


async def test_a_peer_whose_store_hangs_is_still_asked_what_it_knows(here: Replica, other: Other) -> None:
    """Its own word comes at once. What it asks the store is not waited for again."""
    peers = Peers("here", Naming(here.fleet), here.metrics, patience=Patience(where=5.0, late=5.0, store=0.05))
    peers.update([other.peer()])
    other.desk.go.clear()
    other.desk.known = Known(spot(here, "b"), ClaimValue(worker="b"), 7)
    for _ in range(3):
        found = await peers.find(WHERE)
        assert found is not None
        assert found[1] is here.target("b")
        await until(lambda: not peers._links[other.peer().incarnation].slow._running)
    assert len(other.desk.bound_for) == 1
    other.desk.go.set()
    peers.close()


async def test_a_bind_that_hangs_is_waited_for_once(other: Other, peers: Peers) -> None:
    other.desk.go.clear()
    assert await peers.find(WHERE) is None
    began = time.monotonic()
    assert await peers.find(WHERE) is None
    assert time.monotonic() - began < UNHURRIED.where, "the peer is taken not to have the store either"
    other.desk.go.set()


@pytest.mark.parametrize(
    ("code", "state", "up"),
    [("no_worker", "up", True), ("store_unavailable", "up", False), ("no_worker", "read-only", False)],
)
async def test_a_peer_that_refuses_one_session_is_asked_for_the_next(
    here: Replica, other: Other, peers: Peers, code: str, state: str, up: bool
) -> None:
    """Clients can ask for what cannot be: that says nothing of the peer's store."""
    other.desk.refusal, other.desk.state = TurnError(code, "not this one"), state
    assert await peers.find(WHERE) is None
    assert ("bind", KEY) in other.desk.asked or state != "up"
    assert peers.any_up is up


async def test_a_peer_that_is_gone_is_forgotten_with_its_record(here: Replica, other: Other, peers: Peers) -> None:
    await other.shut()
    await peers.tell("closed", KEY, 1)
    assert len(peers) == 1, "its record stands"
    peers.update([])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while len(peers):
                await asyncio.sleep(0.2)
                await peers.tell("closed", KEY, 1)
                peers.update([])
    assert len(peers) == 0


@pytest.mark.parametrize("header", [None, "Bearer wrong", "a-token", "Bearer a-token-and-more"])
async def test_nobody_comes_in_without_the_token(other: Other, header: str | None) -> None:
    headers = [] if header is None else [("authorization", header)]
    answer = await ask(other.url, "POST", "/peers/quick", headers, b'{"replica": "x", "asks": []}')
    assert answer.status == 401
    assert not other.desk.asked


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/peers/quick", b'{"replica": "x", "asks": []}', 200),
        ("POST", "/peers/quick", b"{", 400),
        ("POST", "/peers/quick", b'{"replica": "x", "asks": [{"do": "where"}]}', 400),
        ("POST", "/peers/quick", b" " * (2 << 20), 413),
        ("POST", "/peers/slow", b'{"replica":"x","asks":[' + b'{"do":"x","key":"k"},' * 300 + b"null]}", 400),
        ("POST", "/peers/slow", b'{"replica":"x","asks":[' + b",".join([b'{"do":"x","key":"k"}'] * 300) + b"]}", 413),
        ("GET", "/peers/quick", b"", 404),
        ("POST", "/v1/chat/completions", b"{}", 404),
    ],
)
async def test_only_what_a_peer_says_is_answered(
    other: Other, method: str, path: str, body: bytes, status: int
) -> None:
    answer = await ask(other.url, method, path, [("authorization", "Bearer a-token")], body)
    assert answer.status == status
    assert not other.desk.asked


async def test_a_peer_with_another_token_is_done_without(here: Replica, other: Other) -> None:
    peers = Peers("here", Naming(here.fleet), here.metrics)
    peers.update([other.peer("another")])
    assert await peers.find(WHERE) is None
    assert not other.desk.asked
    peers.close()


@pytest.mark.parametrize("ended", [True, False])
async def test_what_another_replica_has_ended_is_not_claimed_again_after_an_outage(
    here: Replica, other: Other, ended: bool
) -> None:
    inner = MemoryStore()
    store = ScriptedStore(inner)
    peers = Peers("r2", Naming(here.fleet), here.metrics, patience=UNHURRIED)
    one, two = Replica(inner, name="r1"), Replica(store, name="r2", peers=peers)
    other.desk = one.affinity.desk
    one.affinity.start()
    two.affinity.start()
    store.go_away()
    assert (await two.visit())[1] == "degraded"  # nobody has told it of any peer
    if ended:
        turn = await one.turn(final=True)
        turn.answered(200)
        await turn.close()
        turn.release()
    peers.update([other.peer()])
    store.return_()
    await until(lambda: two.affinity.state is StoreState.UP and not alone(two))
    claim = await inner.get(KEY)
    assert (claim is None) is ended
    for replica in (one, two):
        await replica.affinity.aclose()
    peers.close()
    await inner.aclose()


@pytest.mark.parametrize("successor", [True, False])
async def test_a_peer_that_closes_for_who_never_saw_the_claim_leaves_a_successor(
    here: Replica, other: Other, successor: bool
) -> None:
    inner = MemoryStore()
    store = ScriptedStore(inner)
    peers = Peers("r2", Naming(here.fleet), here.metrics, patience=UNHURRIED)
    one, two = Replica(inner, name="r1"), Replica(store, name="r2", peers=peers)
    other.desk = one.affinity.desk
    one.affinity.start()
    two.affinity.start()
    store.go_away()
    turn = await two.turn(final=True)  # nobody has told it of any peer
    assert turn.how == "degraded"
    turn.answered(200)
    made = int(two.affinity._claims.wall()) + (5 if successor else -5)
    claim = (await inner.create_or_get(KEY, ClaimValue(worker="a", replica="r1", created_at=made), 60.0)).claim
    peers.update([other.peer()])
    await turn.close()
    turn.release()
    assert await inner.get(KEY) == (claim if successor else None)
    store.return_()
    await until(lambda: two.affinity.state is StoreState.UP and not two.affinity.pending_closes)
    assert await inner.get(KEY) == (claim if successor else None)
    for replica in (one, two):
        await replica.affinity.aclose()
    peers.close()
    await inner.aclose()


def alone(replica: Replica) -> bool:
    entry = replica.affinity._entries.find(KEY)
    return entry is not None and entry.claim is None


async def test_a_peer_is_asked_to_claim_a_session_where_it_would_be_without_an_answer(
    here: Replica, other: Other
) -> None:
    """Its answer may come too late, and its claim stand."""
    store = ScriptedStore(MemoryStore())
    peers = Peers("r2", Naming(here.fleet), here.metrics, patience=Patience(where=5.0, store=0.05))
    two = Replica(store, name="r2", peers=peers)
    peers.update([other.peer()])
    other.desk.go.clear()
    store.go_away()
    assert (await two.visit())[1] == "degraded"
    guess = two.affinity._placer.by_hash(KEY)
    assert [spot.worker for ask in other.desk.bound_for for spot in ask.at] == [guess.worker.name]
    other.desk.go.set()
    store.return_()
    await two.affinity.aclose()
    peers.close()


@pytest.mark.parametrize(("proven", "how"), [(True, "stored"), (False, "cached")])
async def test_only_what_a_peer_has_proven_is_called_found_in_the_store(
    here: Replica, other: Other, proven: bool, how: str
) -> None:
    """What it remembers and cannot ask for either may have been closed since."""
    store = ScriptedStore(MemoryStore())
    peers = Peers("r2", Naming(here.fleet), here.metrics, patience=UNHURRIED)
    two = Replica(store, name="r2", peers=peers)
    peers.update([other.peer()])
    other.desk.known = Known(spot(here, "b"), ClaimValue(worker="b"), 7, proven)
    store.go_away()
    assert await two.visit() == ("b", how)
    assert two.metrics.unproven.cells.get((), 0) == (not proven)
    store.return_()
    await two.affinity.aclose()
    peers.close()


async def test_a_claim_that_was_given_up_gives_way_to_where_a_peer_serves_the_session(
    here: Replica, other: Other
) -> None:
    inner = MemoryStore()
    store = ScriptedStore(inner)
    peers = Peers("r2", Naming(here.fleet), here.metrics, patience=UNHURRIED)
    two = Replica(store, name="r2", peers=peers, policy=first_of("a"))
    peers.update([other.peer()])
    other.desk.known = Known(spot(here, "b"))
    store.before["create"] = asyncio.Event()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(two.turn(), 0.05)  # its client leaves
    await until(lambda: len(two.affinity._claims._given_up) == 1)
    proposal = next(iter(two.affinity._claims._given_up))
    del store.before["create"]
    await inner.create_or_get(KEY, ClaimValue(worker="a", nonce=proposal), 60.0)  # done late
    assert (await two.visit())[0] == "b"
    claim = await inner.get(KEY)
    assert claim is not None
    assert (claim.value.worker, claim.value.served) == ("b", True)
    await two.affinity.aclose()
    peers.close()
    await inner.aclose()


@pytest.mark.parametrize("served", [True, False])
async def test_a_claim_that_was_given_up_and_done_late_stays_once_a_peer_has_served_by_it(
    here: Replica, other: Other, served: bool
) -> None:
    """Else its maker, which has gone by hash meanwhile, takes the session from there. A peer that has only looked, for
    another one or for the maker itself, knows it as well."""
    inner = MemoryStore()
    store = ScriptedStore(inner)
    guess = here.affinity._placer.by_hash(KEY).worker.name
    elsewhere = "a" if guess != "a" else "b"
    peers = Peers("r2", Naming(here.fleet), here.metrics, patience=UNHURRIED)
    two = Replica(store, name="r2", peers=peers, policy=first_of(elsewhere))
    store.before["create"] = asyncio.Event()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(two.turn(), 0.05)  # its client leaves
    await until(lambda: len(two.affinity._claims._given_up) == 1)
    proposal = next(iter(two.affinity._claims._given_up))
    del store.before["create"]
    store.go_away()
    assert await two.visit() == (guess, "degraded")
    peers.update([other.peer()])
    claim = (await inner.create_or_get(KEY, ClaimValue(worker=elsewhere, nonce=proposal), 60.0)).claim  # done late
    other.desk.known = Known(spot(here, elsewhere), claim.value, claim.revision, True, served=served)
    assert await two.visit() == ((elsewhere, "stored") if served else (guess, "degraded"))
    store.return_()
    await until(lambda: two.affinity.state is StoreState.UP)
    assert (await two.visit())[0] == (elsewhere if served else guess)
    stands = await inner.get(KEY)
    assert stands is not None
    assert (stands.revision == claim.revision) is served
    await two.affinity.aclose()
    peers.close()
    await inner.aclose()


async def test_a_session_that_a_peer_serves_without_the_store_is_claimed_there_by_who_finds_it_back_first(
    here: Replica, other: Other
) -> None:
    store = ScriptedStore(MemoryStore())
    peers = Peers("r2", Naming(here.fleet), here.metrics, patience=UNHURRIED)
    two = Replica(store, name="r2", peers=peers, policy=first_of("a"))
    store.go_away()
    await two.visit(key_of(1))  # which finds it away
    await until(lambda: two.affinity.state is not StoreState.UP)
    store.return_()
    await until(lambda: two.affinity.state is StoreState.UP)
    peers.update([other.peer()])
    other.desk.known = Known(spot(here, "b"))
    assert await two.visit() == ("b", "created")
    claim = await store.get(KEY)
    assert claim is not None
    assert claim.value.served
    other.desk.known = Known()
    assert await two.visit(key_of(2)) == ("a", "created")
    await two.affinity.aclose()
    peers.close()
    await store.aclose()


@pytest.mark.parametrize(("serves", "worker"), [("", "a"), ("b", "b")])
async def test_a_claim_that_was_made_late_stays_unless_a_peer_serves_the_session_elsewhere(
    here: Replica, other: Other, peers: Peers, serves: str, worker: str
) -> None:
    key = next(key for key in map(key_of, range(100)) if rendezvous(key, here.fleet.candidates()).worker.name == "c")
    inner = MemoryStore()
    two = Replica(inner, name="r2", peers=peers, policy=first_of("a"))
    two.affinity._claims.kept_waiting = lambda until: True  # type: ignore[method-assign]
    if serves:
        other.desk.known = Known(spot(here, serves))
    assert await two.visit(key) == (worker, "created")
    assert other.desk.asked == [("where", key)]
    await two.affinity.aclose()
    await inner.aclose()


@pytest.mark.parametrize("served", [True, False])
async def test_a_claim_that_a_peer_serves_by_is_not_doubted(
    here: Replica, other: Other, peers: Peers, served: bool
) -> None:
    """Else the two would serve the session at two workers for as long as the doubt lasts."""
    inner = MemoryStore()
    store = ScriptedStore(inner)
    two = Replica(store, name="r2", peers=peers)
    guess = two.affinity._placer.by_hash(KEY).worker.name
    elsewhere = "a" if guess != "a" else "b"
    store.go_away()
    assert await two.visit() == (guess, "degraded")
    value = ClaimValue(worker=elsewhere, created_at=int(two.affinity._claims.wall()))
    claim = (await inner.create_or_get(KEY, value, 60.0)).claim
    if served:
        other.desk.known = Known(spot(here, elsewhere), claim.value, claim.revision, True)
    store.return_()
    await until(lambda: two.affinity.state is StoreState.UP)
    assert await two.visit() in ([(elsewhere, "stored"), (elsewhere, "cached")] if served else [(guess, "degraded")])
    await two.affinity.aclose()
    await inner.aclose()
