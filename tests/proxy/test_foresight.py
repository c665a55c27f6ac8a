"""Turns that are placed by what is cached: who pays for it, who learns from it, and who is told why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.fleet.placement.prefix import Prefixes
from app.fleet.policies import by_cache
from app.metrics import Metrics
from app.turn.request import Reading
from backends.base import ClaimValue
from tests.support.bench import JSON, SESSION, Bench, bench
from tests.support.http_model import Request
from tests.support.raw import Peer, Script, answers, to_each

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

SYSTEM = "You are one of many agents, and all begin alike. " * 60
DRY_RUN = (b"x-coatcheck-dry-run", b"true")


class Counting(Prefixes):
    """Counts the prompts that somebody wanted to place."""

    asked = 0

    def prompt(self, *args: Any) -> Any:
        self.asked += 1
        return super().prompt(*args)


class Foresight:
    """Settings of a bench that places by prefix."""

    def __init__(self) -> None:
        self.made: Counting | None = None

    def __call__(self, metrics: Metrics) -> Counting:
        self.made = Counting(metrics, memory=1 << 20)
        return self.made

    @property
    def asked(self) -> int:
        assert self.made is not None
        return self.made.asked

    @property
    def settings(self) -> dict[str, Any]:
        return {"policy": by_cache, "foresight": self, "reading": Reading(prompts="yes")}


def answer(tokens: int, cached: int) -> bytes:
    usage = {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    body = json.dumps({"usage": usage}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


def answering(tokens: int, cached: int) -> Script:
    return answers(answer(tokens, cached))


def request(system: str = SYSTEM, user: str = "hello") -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {
        "method": "POST",
        "body": json.dumps({"model": "m", "messages": messages}).encode(),
    }


async def ask(b: Bench, *headers: tuple[bytes, bytes], **settings: Any) -> str:
    call = await b.get(JSON, *headers, **(request() | settings))
    assert call.status == 200
    return dict(call.headers)[b"x-coatcheck-worker"].decode()


async def test_turns_go_where_the_beginning_of_their_prompt_is() -> None:
    foresight = Foresight()
    async with bench(*[answering(700, 650)] * 4, **foresight.settings) as b:
        home = await ask(b)
        sessions = [(b"x-dynamo-session-id", b"s%d" % number) for number in range(2)]
        assert {await ask(b, session, **request(user="other")) for session in sessions} == {home}
        assert {await ask(b, **request(user=str(number))) for number in range(2)} == {home}
        others = {await ask(b, **request(system=f"{number} " + SYSTEM)) for number in range(12)}
        assert len(others) > 1


async def test_bound_turns_pay_nothing() -> None:
    foresight = Foresight()
    async with bench(*[answering(700, 650)] * 2, **foresight.settings) as b:
        await ask(b, SESSION)
        assert foresight.asked == 1
        for _ in range(3):
            await ask(b, SESSION)
        assert foresight.asked == 1


async def test_who_names_a_worker_pays_nothing() -> None:
    foresight = Foresight()
    async with bench(*[answering(700, 650)] * 2, **foresight.settings) as b:
        for worker in (b"w0", b"w1"):
            assert await ask(b, (b"x-dynamo-worker-instance-id", worker)) == worker.decode()
        assert foresight.asked == 0


async def test_a_turn_whose_claim_stands_elsewhere_is_not_looked_at() -> None:
    """Another replica has made it: this one reads it from the store."""
    foresight = Foresight()
    async with bench(*[answering(700, 650)] * 2, **foresight.settings) as b:
        await b.store.create_or_get(b.hasher.key(b"", SESSION[1]), ClaimValue(worker="w1"), 100.0)
        assert await ask(b, SESSION) == "w1"
        assert foresight.made is not None
        assert not len(foresight.made)


async def test_what_was_foreseen_is_compared_with_what_is_told() -> None:
    foresight = Foresight()
    async with bench(answering(1000, 980), **foresight.settings) as b:
        await ask(b)
        await ask(b)
        assert 780 < b.metrics.foreseen_tokens.cells[()] <= 1000  # whole blocks of what 980 are: a fifth less at most
        assert b.metrics.found_tokens.cells[()] == 1960
        assert b.metrics.foresights_wrong.cells[()] == 0


async def test_who_has_lost_its_cache_is_found_out() -> None:
    foresight = Foresight()
    told = iter((0, 900, 0))

    async def worker(peer: Peer, _: Request) -> None:
        await peer.send(answer(1000, next(told)))

    async with bench(to_each(worker), **foresight.settings) as b:
        await ask(b, **request(system="1" + SYSTEM))
        await ask(b, **request(system="1" + SYSTEM))
        assert b.metrics.foresights_wrong.cells[()] == 0
        await ask(b, **request(system="1" + SYSTEM))
        assert b.metrics.foresights_wrong.cells[()] == 1


async def test_a_dry_run_says_what_was_seen_and_learns_nothing() -> None:
    foresight = Foresight()
    async with bench(*[answering(700, 650)] * 2, **foresight.settings) as b:
        home = await ask(b)
        assert foresight.made is not None
        known = len(foresight.made)
        for headers in ([], [SESSION]):
            said = json.loads((await b.get(JSON, DRY_RUN, *headers, **request(user="more"))).body)
            assert said["worker"] == home
            assert said["because"] == "policy"
            assert said["placement"]["cached_share"] > 0.8
            assert said["placement"]["best_share"] == said["placement"]["cached_share"]
        assert len(foresight.made) == known


@pytest.mark.parametrize("body", [b"not json", b'{"model": NaN, "messages": []}', b"[]"])
async def test_what_cannot_be_read_is_placed_all_the_same(body: bytes) -> None:
    async with bench(answering(1, 0), **Foresight().settings) as b:
        assert await ask(b, body=body) == "w0"
