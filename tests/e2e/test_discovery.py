"""Fleets that grow and shrink under load, by each kind of source; operators' levers; a sidecar that freezes; settings
that change while turns run. Real processes, two replicas; where turns ran is what the workers noted."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dns.rcode
import pytest

from app.fleet.specs import worker_name
from backends import open_store
from tests.e2e.conftest import PATIENCE, new_session
from tests.support.etcd import EtcdServer
from tests.support.nameserver import NameServer
from tests.support.processes import Process, Processes, Replica, Worker, metrics, total, turns, wait_until
from tests.support.tcp import free_ports
from tests.support.wire import ask, turn

PER_SECOND = 20
GRACE = 1.5


@dataclass
class Load:
    """Turns at a steady pace, of old and of new sessions in turn, at all replicas."""

    replicas: Sequence[Replica]
    sessions: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    done: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        task = asyncio.create_task(self._run(stop))
        try:
            yield
        finally:
            stop.set()
            await task

    async def _run(self, stop: asyncio.Event) -> None:
        asking: list[asyncio.Task[None]] = []
        begun = time.monotonic()
        for number in itertools.count():
            if stop.is_set():
                break
            if number % 4 == 0:
                self.sessions.append(new_session())
            session = self.sessions[number * 7 % len(self.sessions)]
            asking.append(asyncio.create_task(self._turn(session, self.replicas[number % len(self.replicas)])))
            await asyncio.sleep(max(0.0, begun + number / PER_SECOND - time.monotonic()))
        await asyncio.gather(*asking)

    async def _turn(self, session: str, replica: Replica) -> None:
        try:
            answer = await turn(replica.url, session=session, tokens=2)
        except Exception as error:
            self.failed.append(repr(error))
            return
        if answer.status != 200:
            self.failed.append(f"{answer.status} {answer.body[:200]!r}")
        self.done += 1

    async def count(self, more: int) -> None:
        wanted = self.done + more
        await wait_until(lambda: self.done >= wanted, 60)


async def fleet_of(replica: Replica) -> dict[str, dict[str, Any]]:
    answer = await ask(replica.url, target="/admin/workers")
    return {each["name"]: each for each in answer.json["workers"]}


async def until_all_see(replicas: Sequence[Replica], names: set[str], limit: float = 30.0) -> None:
    """As up, and nobody else."""
    for replica in replicas:

        async def sees(replica: Replica = replica) -> bool:
            fleet = await fleet_of(replica)
            return {name for name, each in fleet.items() if each["available"]} == names == set(fleet)

        await wait_until(sees, limit)


async def sites(workers: Sequence[Worker]) -> dict[str, Counter[str]]:
    """Of each session, at which workers its turns were, by the workers' own records."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for worker in workers:
        for record in await turns(worker):
            found[record["session"]][worker.name] += 1
    return found


class Grown:
    """A fleet of two workers that becomes six, and then three of these; how depends on the kind of source."""

    def __init__(self, processes: Processes, source: str, claims: str, names: NameServer | None = None) -> None:
        """`names`: where names are looked up, where half of the workers are the addresses of one, and half the records
        of another."""
        self.processes, self.source, self.claims, self.names = processes, source, claims, names
        self._port = free_ports(1)[0]
        """Of each address of the first name."""
        self._addresses = (f"127.0.0.{number}" for number in itertools.count(2))
        self.file = processes.folder / "workers.toml"
        self._leaving: Process | None = None

    def mocks(self, count: int, *, addresses: int = 0) -> tuple[Process, list[Worker]]:
        """`addresses`: so many of them listen each at an address of its own."""
        if self.names is not None:
            return self._named_mocks(addresses, count - addresses)
        options = ["--register", self.claims] if self.source == "registry" else []
        first = free_ports(1)[0]
        process = self.processes.start(
            "mocks", "app", "mock", "--port", "0", "--count", str(count), "--name", f"m{first}", *options
        )
        named = [Worker(f"m{first}-{url.rpartition(':')[2]}", url, process) for url in process.urls(count)]
        return process, [Worker(each.name if count > 1 else f"m{first}", each.url, process) for each in named]

    def _named_mocks(self, addresses: int, pods: int) -> tuple[Process, list[Worker]]:
        start, places = self.processes.start, [(next(self._addresses), self._port) for _ in range(addresses)]
        started = [start("mock", "app", "mock", "--host", host, "--port", str(port)) for host, port in places]
        workers = [Worker(worker_name(each.urls(1)[0]), each.urls(1)[0], each) for each in started]
        if pods:
            started.append(process := start("mocks", "app", "mock", "--port", "0", "--count", str(pods)))
            workers += [Worker(worker_name(_pod(url)), url, process) for url in process.urls(pods)]
        return started[-1], workers

    def begin(self) -> tuple[list[Worker], list[str]]:
        _, workers = self.mocks(2, addresses=1)
        self._write(workers)
        options = [f"--claims={self.claims}", f"--worker-grace={GRACE}", f"--store-deadline={PATIENCE}"]
        options.append("--slow-start=0")
        if self.names is not None:
            names = (f"dns://fleet.test:{self._port}", "dns+srv://pods.test")
            return workers, [*options, *(f"--workers-from={name}?nameserver={self.names.address}" for name in names)]
        return workers, [*options, f"--workers-from={self.file.as_uri()}"] if self.source == "file" else options

    def grow(self, workers: list[Worker]) -> tuple[list[Worker], list[Worker]]:
        """Those that stay, and those that will go."""
        _, staying = self.mocks(1, addresses=1)
        self._leaving, leaving = self.mocks(3, addresses=1)
        self._write([*workers, *staying, *leaving])
        return [*workers, *staying], leaving

    def shrink(self, staying: list[Worker]) -> None:
        self._write(staying)
        if self.source == "registry":
            assert self._leaving is not None
            self._leaving.terminate()  # says good-bye, and goes

    def _write(self, workers: list[Worker]) -> None:
        if self.names is not None:
            hosts = [str(urlsplit(each.url).hostname) for each in workers]
            pods = [urlsplit(_pod(each.url)) for each, host in zip(workers, hosts, strict=True) if host == "127.0.0.1"]
            records = {(str(pod.hostname), "A"): ["127.0.0.1"] for pod in pods}
            self.names.records = {
                ("fleet.test", "A"): [host for host in hosts if host != "127.0.0.1"],
                ("pods.test", "SRV"): [f"10 10 {pod.port} {pod.hostname}." for pod in pods],
                **records,
            }
        self.file.write_text("".join(f'[[worker]]\nurl = "{each.url}"\nname = "{each.name}"\n' for each in workers))


def _pod(url: str) -> str:
    """Its URL by a name of its own, as a StatefulSet's pods have."""
    port = urlsplit(url).port
    return f"http://pod-{port}.pods.test:{port}"


@pytest.fixture(params=["file", "registry on etcd", "dns and dns+srv"])
def grown(request: pytest.FixtureRequest, quick_path: Path, processes: Processes) -> Iterator[Grown]:
    if request.param == "registry on etcd":
        with EtcdServer() as server:
            yield Grown(processes, "registry", server.url())
    elif request.param == "dns and dns+srv":
        with NameServer() as names:
            yield Grown(processes, "dns", f"file://{quick_path}/claims", names)
    else:
        yield Grown(processes, request.param.split()[0], f"file://{quick_path}/claims")


async def test_a_fleet_grows_and_shrinks_without_a_failed_turn(grown: Grown) -> None:
    first, options = grown.begin()
    replicas = grown.processes.replicas_with(options, options)
    await until_all_see(replicas, {each.name for each in first})
    load = Load(replicas)
    async with load.running():
        await load.count(10)
        staying, leaving = grown.grow(first)
        await until_all_see(replicas, {each.name for each in (*staying, *leaving)})
        await load.count(40)
        before = await sites(leaving)
        assert any(before.values()), "the newcomers were given nothing"
        grown.shrink(staying)
        await until_all_see(replicas, {each.name for each in staying})
        await load.count(30)
    assert load.failed == []
    there = await sites(staying)
    moved = [session for session, places in there.items() if len(places) > 1]
    assert not moved, "sessions of those that stayed have moved between them"
    for replica in replicas:
        samples = await metrics(replica)
        known = {name for name in samples if name.startswith("coatcheck_in_flight{")}
        assert known == {f'coatcheck_in_flight{{worker="{each.name}"}}' for each in staying}
        assert not total(samples, "coatcheck_turns_total", 'outcome="failed"')


async def test_an_operators_word_at_one_replica_is_obeyed_by_the_other(quick_path: Path, processes: Processes) -> None:
    workers = processes.workers(3)
    one, other = processes.replicas(2, workers, quick_path / "claims")

    async def say(word: str, name: str, replica: Replica, query: str = "") -> None:
        answer = await ask(replica.url, "POST", f"/admin/workers/{name}/{word}?by=me{query}", body=b"")
        assert answer.status == 200, answer.body

    async def candidates(replica: Replica) -> set[str]:
        return {name for name, each in (await fleet_of(replica)).items() if each["available"]}

    await wait_until(lambda: _equals(candidates(other), {"w0", "w1", "w2"}), 30)
    bound = new_session()
    hint = [("x-dynamo-worker-instance-id", "w0")]
    assert (await turn(one.url, session=bound, headers=hint)).worker == "w0"

    await say("cordon", "w0", one)
    await wait_until(lambda: _equals(candidates(other), {"w1", "w2"}), 20)
    cordoned = (await fleet_of(other))["w0"]
    assert (cordoned["mark"], cordoned["by"]) == ("cordoned", "me")
    assert abs(cordoned["at"] - time.time()) < 20
    assert {(await turn(other.url, session=new_session())).worker for _ in range(12)} == {"w1", "w2"}
    assert (await turn(other.url, session=bound)).worker == "w0"

    await say("drain", "w0", other, "&deadline=0.5")
    await wait_until(lambda: _equals(candidates(one), {"w1", "w2"}), 20)
    await wait_until(lambda: _lacks(fleet_of(one), "w0"), 20)
    assert (await turn(one.url, session=bound)).worker != "w0"
    await say("uncordon", "w0", one)
    await wait_until(lambda: _has(fleet_of(other), "w0"), 20)
    unknown = await ask(one.url, "POST", "/admin/workers/nobody/cordon", body=b"")
    assert (unknown.status, unknown.json["error"]["code"]) == (400, "unknown_worker")


async def _equals(coming: Any, wanted: object) -> bool:
    return bool(await coming == wanted)


async def _has(coming: Any, name: str) -> bool:
    return name in await coming


async def _lacks(coming: Any, name: str) -> bool:
    return name not in await coming


async def test_workers_of_a_name_are_its_addresses_and_a_name_server_in_trouble_moves_nobody(
    quick_path: Path, processes: Processes
) -> None:
    """One worker that listens at all addresses of the loopback is as many workers as the name has addresses."""
    (port,) = free_ports(1)
    mock = processes.start("mock", "app", "mock", "--host", "0.0.0.0", "--port", str(port), "--ttft-ms", "2")
    mock.urls(1)
    with NameServer() as names:

        def say(*numbers: int) -> set[str]:
            addresses = [f"127.0.0.{number}" for number in numbers]
            names.records = {("fleet.test", "A"): addresses}
            return {worker_name(f"http://{address}:{port}") for address in addresses}

        before = say(1, 2, 3)
        options = [f"--claims=file://{quick_path}/claims", f"--worker-grace={GRACE}", f"--store-deadline={PATIENCE}"]
        options += ["--slow-start=0", f"--workers-from=dns://fleet.test:{port}?nameserver={names.address}"]
        (replica,) = processes.replicas_with(options)
        await until_all_see([replica], before)
        at = {}
        for _ in range(12):
            answer = await turn(replica.url, session=(session := new_session()), tokens=1)
            assert answer.status == 200
            at[session] = answer.worker
        assert set(at.values()) == before
        names.rcode = dns.rcode.SERVFAIL
        await _asked_again(names)
        names.silent = True
        await _asked_again(names)
        assert set(await fleet_of(replica)) == before
        for session, worker in at.items():
            answer = await turn(replica.url, session=session, tokens=1)
            assert (answer.status, answer.worker) == (200, worker)
        names.silent, names.rcode = False, dns.rcode.NOERROR
        after = say(2, 3, 4)
        await until_all_see([replica], after)
        for session, worker in at.items():
            answer = await turn(replica.url, session=session, tokens=1)
            assert answer.status == 200
            assert answer.worker == worker if worker in after else answer.worker in after


async def _asked_again(names: NameServer) -> None:
    asked = names.asked
    await wait_until(lambda: names.asked >= asked + 2, 60)


async def test_a_worker_that_comes_back_with_an_empty_cache_is_known_to_be_cold(
    quick_path: Path, processes: Processes
) -> None:
    """It was killed, and is there again under its name and at its address before anybody took it for gone: both
    replicas say so, and its sessions go on there."""
    claims = f"file://{quick_path}/claims"
    first, second = free_ports(2)

    def start(port: int) -> Process:
        return processes.start(
            f"m{port}", "app", "mock", "--port", str(port), "--name", f"m{port}", "--register", claims, "--ttft-ms", "2"
        )

    back, names = start(first), {f"m{first}", f"m{second}"}
    start(second)
    options = [f"--claims={claims}", f"--store-deadline={PATIENCE}"]
    replicas = processes.replicas_with(options, options)
    await until_all_see(replicas, names)
    sessions = [new_session() for _ in range(12)]
    at = {each: (await turn(replicas[0].url, session=each, tokens=1)).worker for each in sessions}
    assert set(at.values()) == names
    lives = [(await fleet_of(replica))[f"m{first}"]["incarnation"] for replica in replicas]
    assert lives[0] == lives[1] != ""
    back.kill()
    start(first)

    async def is_cold(replica: Replica) -> bool:
        told = (await fleet_of(replica))[f"m{first}"]
        return bool(told["available"] and told["incarnation"] not in ("", lives[0]))

    for replica in replicas:
        await wait_until(lambda replica=replica: is_cold(replica), 60)  # type: ignore[misc]
        assert f"worker m{first} has come back with an empty cache" in replica.process.output()
    for session, worker in at.items():
        for replica in replicas:
            answer = await turn(replica.url, session=session, tokens=1)
            assert (answer.status, answer.worker) == (200, worker)


async def test_a_sidecar_that_was_frozen_registers_again_and_says_good_bye(
    quick_path: Path, processes: Processes
) -> None:
    claims = f"file://{quick_path}/claims"
    (worker,) = processes.workers(1)
    sidecar = processes.start(
        "sidecar",
        *("app", "register", "--worker-url", worker.url, "--to", claims, "--name", "w", "--ttl", "1"),
        "--drain=3",
    )
    store = await open_store(claims)
    try:

        async def record() -> dict[str, Any] | None:
            found = (await store.registry.list("workers")).get("w")
            return None if found is None else json.loads(found)

        first = await wait_until(record, 30)
        assert first["url"] == worker.url
        assert first["models"] == ["mock-model"]
        assert first["incarnation"]
        sidecar.freeze()
        await wait_until(lambda: _equals(record(), None), 30)
        sidecar.thaw()
        assert await wait_until(record, 10) == first  # the engine was there all the time: its cache is not lost
        sidecar.terminate()
        drained = await wait_until(lambda: _draining(record), 30)
        assert drained["until"] > time.time()
        assert sidecar.wait(10) == 0
        assert await record() is None
    finally:
        await store.aclose()


async def _draining(record: Callable[[], Any]) -> dict[str, Any] | None:
    found = await record()
    return found if found is not None and found.get("draining") else None


async def test_settings_change_while_turns_run_in_all_processes(quick_path: Path, processes: Processes) -> None:
    w0, w1 = processes.workers(2)
    config = processes.folder / "router.toml"

    def write(*workers: Worker, more: str = "") -> None:
        named = ", ".join(f'"{each.url},name={each.name}"' for each in workers)
        config.write_text(f"worker = [{named}]\nworker-grace = 1\n{more}")

    write(w0, more="max-body-bytes = 2000\n")
    (replica,) = processes.replicas_with(
        ["--config", str(config), "--processes", "2", f"--claims=file://{quick_path}/claims"]
    )

    async def seen() -> set[frozenset[str]]:
        """By whichever process answers."""
        return {frozenset(await fleet_of(replica)) for _ in range(8)}

    load = Load([replica])
    async with load.running():
        await load.count(5)
        os.kill(replica.process.pid, signal.SIGHUP)  # nothing has changed
        await load.count(5)
        write(w0, w1, more="max-body-bytes = 4000\nsession-ttl = 77\n")
        os.kill(replica.process.pid, signal.SIGHUP)
        await wait_until(lambda: _equals(seen(), {frozenset(["w0", "w1"])}), 30)

        async def taken() -> set[int]:
            """What becomes of a large turn, by whichever process answers: chance may pass over one for a while."""
            return {(await turn(replica.url, content="x" * 3000)).status for _ in range(8)}

        await wait_until(lambda: _equals(taken(), {200}), 30)
        write(w1, more="port = \n")
        await wait_until(lambda: "line 3" in replica.process.output(), 30)  # looked at without a signal
        write(w1, more='max-body-bytes = "none"\n')
        await wait_until(lambda: "(line 3)" in replica.process.output(), 30)
        assert await seen() == {frozenset(["w0", "w1"])}
        write(w1)
        await wait_until(lambda: _equals(seen(), {frozenset(["w1"])}), 30)
        await load.count(5)
    assert load.failed == []
    said = replica.process.output()
    assert said.count("the settings stay as they were") == 2
    assert "restart it for: session-ttl" in said
