"""Where names lead, while name servers are well, silent, slow or wrong."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

from app.http.names import Address, Names, NoAddress


class Server:
    """A name server. `say` is called for each name, in the thread of its lookup."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.known: dict[str, str] = {}
        self.silent: set[str] = set()
        self.speak = threading.Event()
        self.now = 0.0

    def __call__(self, host: str) -> list[Address]:
        self.asked.append(host)
        if host in self.silent:
            self.speak.wait(10)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, (self.known[host], 0))]

    def clock(self) -> float:
        return self.now


@pytest.fixture
def server() -> Server:
    return Server()


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def test_an_answer_is_used_for_a_while(server: Server) -> None:
    names = Names(server, clock=server.clock)
    server.known["a"] = "10.0.0.1"
    for _ in range(3):
        assert await names.addresses("a", 80) == [(socket.AF_INET, ("10.0.0.1", 80))]
    assert await names.addresses("a", 81) == [(socket.AF_INET, ("10.0.0.1", 81))]
    assert server.asked == ["a"]
    server.now, server.known["a"] = 5.0, "10.0.0.2"
    assert await names.addresses("a", 80) == [(socket.AF_INET, ("10.0.0.2", 80))]


async def test_what_was_known_goes_on_while_lookups_fail(server: Server) -> None:
    names = Names(server, clock=server.clock)
    server.known["a"] = "10.0.0.1"
    await names.addresses("a", 80)
    del server.known["a"]
    for server.now in (5.0, 6.0, 60.0, 3600.0):
        assert await names.addresses("a", 80) == [(socket.AF_INET, ("10.0.0.1", 80))]
        await settled(lambda: names._names["a"].asked is None)
    server.now, server.known["a"] = 4000.0, "10.0.0.9"
    await names.addresses("a", 80)
    await settled(lambda: names._names["a"].addresses[0][1][0] == "10.0.0.9")


async def test_a_silent_name_delays_its_own_workers_once_and_no_others(server: Server) -> None:
    names = Names(server, clock=server.clock)
    server.known |= {"quick": "10.0.0.1"} | {f"slow{n}": "10.0.1.1" for n in range(40)}
    for name in server.known:
        await names.addresses(name, 80)
    server.silent = {name for name in server.known if name != "quick"}
    server.now = 10.0
    loop = asyncio.get_running_loop()
    began = loop.time()
    slow = [asyncio.create_task(names.addresses(f"slow{n}", 80)) for n in range(40)]
    await asyncio.sleep(0)
    await names.addresses("quick", 80)
    assert loop.time() - began < 5.0  # one after the other they would take ten
    assert await asyncio.gather(*slow) == [[(socket.AF_INET, ("10.0.1.1", 80))]] * 40
    again = [asyncio.create_task(names.addresses(f"slow{n}", 80)) for n in range(40)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert all(task.done() for task in again)  # known to be silent: not waited for
    assert sorted(server.asked[41:]) == sorted([f"slow{n}" for n in range(40)] + ["quick"])  # one lookup each
    server.speak.set()
    await settled(lambda: not any(name.asked for name in names._names.values()))


async def test_a_name_that_never_was_answered_has_no_address(server: Server) -> None:
    names = Names(server, clock=server.clock)
    with pytest.raises(NoAddress):
        await names.addresses("a", 80)
    with pytest.raises(NoAddress):
        await names.addresses("a", 80)
    assert server.asked == ["a"]  # not again at once
    server.now, server.known["a"] = 1.0, "10.0.0.1"
    assert await names.addresses("a", 80)


async def test_many_who_wait_share_a_lookup_and_may_leave(server: Server) -> None:
    names = Names(server, clock=server.clock)
    server.known["a"], server.silent = "10.0.0.1", {"a"}
    waiting = [asyncio.create_task(names.addresses("a", 80)) for _ in range(5)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    server.speak.set()
    assert await asyncio.gather(*waiting[1:]) == [[(socket.AF_INET, ("10.0.0.1", 80))]] * 4
    assert server.asked == ["a"]
