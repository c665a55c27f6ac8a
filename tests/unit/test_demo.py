"""The demonstration's parts that need no processes: where turns enter, what is said, what is counted, the report."""

from __future__ import annotations

import re
import socket
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from app import Trouble
from app.demo.fleet import free_ports
from app.demo.load import Address, ByHash, InTurn, Load, Served, _Conversation, figures, moves
from app.demo.report import Shown, Told, html
from mocker import traces
from mocker.cache import TOKEN_BYTES
from mocker.traces import Agents, Chain, Session, Turn
from mocker.wire import parse_chat
from tests.support.fakes import in_virtual_time

WORKERS: list[Address] = [("127.0.0.1", 9001 + number) for number in range(4)]
SESSIONS = [f"s{number}" for number in range(400)]


def turn(session: str, at: float, worker: str, *, cached: int = 0, trouble: str = "") -> Served:
    return Served(session, at, at + 1.0, 0.1, worker, 100, cached, trouble)


def test_a_hash_spreads_sessions_and_moves_only_those_of_who_is_away() -> None:
    up = set(WORKERS)
    ring = ByHash(WORKERS, lambda address: address in up)

    def placed() -> dict[str, Address]:
        return {session: next(iter(ring.addresses(session, b""))) for session in SESSIONS}

    before = placed()
    assert all(60 < count < 140 for count in Counter(before.values()).values())
    up.discard(WORKERS[3])
    away = placed()
    assert {session for session in SESSIONS if away[session] != before[session]} == {
        session for session in SESSIONS if before[session] == WORKERS[3]
    }
    up.add(WORKERS[3])
    assert placed() == before


def test_turns_enter_at_one_after_the_other_and_try_all() -> None:
    entrance = InTurn(WORKERS[:2])
    orders = [list(entrance.addresses("s", b"")) for _ in range(4)]
    assert all(sorted(order) == WORKERS[:2] for order in orders)
    assert all(one[0] != other[0] for one, other in pairwise(orders))
    one, other = iter(entrance.addresses("s1", b"")), iter(entrance.addresses("s2", b""))  # two turns that both try
    assert {next(one), next(other)} == {next(other), next(one)} == set(WORKERS[:2])


def test_what_is_said_has_the_tokens_of_its_turn_and_grows() -> None:
    wanted = Agents(sessions=5, rate=1.0, prompts=2, prompt_tokens=900, turn_tokens=150, answer_tokens=40, turns=4.0)
    first_blocks = set()
    for session in traces.agents(wanted, 16):
        conversation = _Conversation(session, 1, 16)
        prompts = []
        for each in session.turns:
            body = conversation.ask(each)
            prompts.append(parse_chat(body).prompt)
            assert abs(len(prompts[-1]) / TOKEN_BYTES - each.prompt) < 0.02 * each.prompt + 16
            assert msgspec.json.decode(body)["max_tokens"] == each.answer
            conversation.hear("word" * each.answer)
        generation = len(b"<|im_start|>assistant\n")
        assert all(after.startswith(before[:-generation]) for before, after in pairwise(prompts))
        first_blocks.add(prompts[0][:1600])
    assert len(first_blocks) == 2  # system prompts


@in_virtual_time
async def test_it_ends_with_its_last_turn_and_not_when_the_next_one_would_have_been() -> None:
    """A pause between two turns may be half a minute long."""
    later = Turn(prompt=100, answer=1, after=50.0)
    sessions = [Session(f"s{at}", 0, float(at), Chain((), 0, 6), [later], None) for at in range(3)]
    load = Load(sessions, InTurn(WORKERS), seconds=10.0, seed=1, block_size=16, headers=lambda session, last: {})
    await load.run()
    assert load.now < 3.0
    assert load.served == []


def test_no_connection_takes_the_port_of_who_starts_later_or_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.demo.fleet._SHARES", 1)  # all begin at the same one
    ports = free_ports(14)
    assert len(set(ports)) == 14
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < max(first_of_connections, 20_000)
    with socket.create_server(("127.0.0.1", ports[0])):
        assert ports[0] not in free_ports(14)


def test_two_demonstrations_begin_at_other_ports_though_their_processes_have_one_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in two containers with the host's network."""
    monkeypatch.setattr("app.demo.fleet.is_free", lambda host, port: True)
    monkeypatch.setattr("os.getpid", lambda: 7)
    assert len({free_ports(1)[0] for _ in range(100)}) > 1


def test_too_few_ports_are_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.demo.fleet.is_free", lambda host, port: port % 1000 == 1)
    assert len(free_ports(10)) == 10
    with pytest.raises(Trouble, match=r"only 10 are free, and 11 are needed; .* fewer \(--workers\)"):
        free_ports(11)


def test_a_session_is_split_only_if_nobody_has_killed_its_worker() -> None:
    served = [
        *(turn("stays", at, "w1") for at in (0.0, 5.0, 9.0)),
        *(turn("lost", at, worker) for at, worker in ((1.0, "w2"), (6.0, "w1"), (9.0, "w1"))),
        *(turn("returns", at, worker) for at, worker in ((2.0, "w2"), (6.0, "w1"), (9.0, "w2"))),
        *(turn("wanders", at, worker) for at, worker in ((2.0, "w1"), (6.0, "w3"))),
        turn("fails", 2.5, "w1"),
        turn("fails", 3.9, "w2", trouble="the connection broke"),
    ]
    assert moves(served, [("w2", 4.0)]) == ({"returns", "wanders"}, {"lost", "returns"})
    now = figures(served, [("w2", 4.0)], [8.0])
    assert (now.turns, now.failed, now.cut_by_worker, now.cut_by_replica, now.sessions) == (12, 1, 1, 0, 5)


class _Strict(HTMLParser):
    """Every element that is opened is closed in its order, and nothing is fetched."""

    VOID = frozenset({"meta", "line", "path", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        if tag not in self.VOID:
            self.open.append(tag)
        assert not {name for name, _ in attributes} & {"src", "href", "onload", "onclick"}

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def shown(key: str, served: list[Served]) -> Shown:
    told = figures(served, [("w2", 4.0)], [])
    return Shown(key, f"<{key}>", "how & why", 10.0, served, [(4.0, "worker w2 killed")], told)


def test_the_report_is_one_page_that_needs_nothing_else() -> None:
    """Whatever came of the ways: much, nothing at all, or only failures."""
    busy = [turn(session, at * 0.2, f"w{at % 3 + 1}", cached=50) for at in range(50) for session in SESSIONS[:300]]
    broken = [turn("s1", 1.0, "", trouble="<b>status 503</b>")]
    page = html([shown("turns", busy), shown("hash", []), shown("coatcheck", broken)], Told(1, 4, "p", "prefix", 9.0))
    parser = _Strict()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert parser.seen["svg"] >= 5
    assert parser.seen["rect"] > 1000
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"https?://|url\(|@import|<script", page)
    assert "<b>status" not in page
    assert len(page) < 3_000_000


def test_one_way_alone_is_a_report_as_well() -> None:
    page = html([shown("coatcheck", [turn("s1", 1.0, "w1", cached=60)])], Told(1, 2, "p", "least-loaded", 9.0))
    assert "<b>60%</b>" in page
    assert "()" not in page
