"""The operators' page in a real browser, before real replicas and workers: `make test-browser`.

What the page says is compared with what the workers recorded and the other replica answers. `PICTURES=FOLDER` keeps
pictures of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from app.record import Record, Workers, decode
from app.replicas import BEAT, KIND, STANDS
from app.traffic import Figures, Sums
from backends.file import FileStore
from tests.support.browser import Page, browser
from tests.support.processes import Processes, Replica, Worker, turns, wait_until
from tests.support.wire import ask

TOKEN = "hush"
LIMIT = 60.0
QUESTION = {"model": "mock-model", "messages": [{"role": "user", "content": "Where is my coat?"}], "max_tokens": 3}
QUICK = ("--probe-interval=0.5", "--down-after=2")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


@contextlib.asynccontextmanager
async def watched(folder: Path, width: int, height: int = 900) -> AsyncIterator[Page]:
    """A tab of that size, which must have nothing to complain of in the end."""
    async with browser(folder / "profile") as page:
        await page.size(width, height)
        yield page
        await picture(page, f"page-{width}")
        # The browser's own word on a connection that is lost or refused is none of the page's.
        assert not [error for error in page.errors if "net::ERR_" not in error]


async def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("PICTURES"):
        await page.picture(Path(folder) / f"{name}.png")


async def turn(replica: Replica, session: str) -> int:
    answer = await ask(
        replica.url,
        "POST",
        "/v1/chat/completions",
        headers=[("content-type", "application/json"), ("x-dynamo-session-id", session)],
        body=json.dumps(QUESTION).encode(),
    )
    return answer.status


@contextlib.asynccontextmanager
async def traffic(*replicas: Replica) -> AsyncIterator[None]:
    """Sessions that go on and on, at all replicas in turn."""

    async def go_on(number: int) -> None:
        for count in range(10**6):
            await turn(replicas[count % len(replicas)], f"session-{number}")
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(go_on(number)) for number in range(8)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def of_row(name: str, what: str) -> str:
    return f"document.querySelector('[data-worker={name}] {what}').textContent"


def workers_of(processes: Processes) -> list[Worker]:
    return processes.workers(3, "--ttft-ms=20", apart=True)


async def test_it_follows_a_worker_that_is_killed_and_returns_and_drains_one_by_a_click(
    processes: Processes, tmp_path: Path
) -> None:
    workers = workers_of(processes)
    here, there = processes.replicas(2, workers, tmp_path / "claims", *QUICK)
    async with watched(tmp_path, 1280) as page, traffic(here, there):
        await page.open(f"{here.url}/admin/")
        await page.until("document.querySelectorAll('#workers tbody tr').length === 3")
        await page.until("document.querySelector('#live').textContent === 'live'")
        await page.until(f"Number({of_row('w0', '.turns')}) > 0")
        await page.until("document.querySelectorAll('#replicas tbody tr').length === 2")
        await page.until("document.querySelector('#replicas-note').textContent === 'all agree'")
        await page.until("document.querySelector('#how path.c-cached').getAttribute('d').length > 0")
        drawn = await page.value("document.querySelector('#how').querySelector('svg').outerHTML")

        # It is killed, and comes back.
        port = workers[1].url.rpartition(":")[2]
        workers[1].process.kill()
        await page.until(f"{of_row('w1', '.pill')} === 'down'")
        await page.until("document.querySelector('#events').textContent.includes('w1')")
        await page.until("document.querySelector('#tiles').textContent.includes('1 down')")
        assert await page.value("document.querySelector('#workers tbody tr').dataset.worker") == "w1", (
            "trouble is first"
        )
        processes.start("worker", "mocker", "--port", port, "--ttft-ms=20").urls(1)
        await page.until(f"{of_row('w1', '.pill')} === 'up'")
        assert await page.value("document.querySelector('#how').querySelector('svg').outerHTML") != drawn

        # It is drained by a click, at all replicas.
        await page.click("[data-worker=w2] button")
        await page.until("document.querySelector('#worker').open")
        await page.until("document.querySelector('#worker-facts').textContent.includes('mock-model')")
        await picture(page, "page-worker")
        await page.click("#worker [data-act=drain]")
        await page.until("document.querySelector('#worker-state').textContent === 'draining'")
        await page.click("#worker [data-act=remove]")
        await page.until("document.querySelector('#worker [data-act=remove]').textContent === 'Remove it now?'")
        await page.click("#worker form button[type=submit]")
        await page.click("[data-worker=w0] button")
        await page.until("document.querySelector('#worker').open")
        asked = await page.value("document.querySelector('#worker [data-act=remove]').textContent")
        assert asked == "Remove", "who was sure of one worker is not of another"
        await page.click("#worker form button[type=submit]")
        await page.until(f"{of_row('w2', '.pill')} === 'draining'")

        async def is_draining_there() -> bool:
            said = (await ask(there.url, target="/admin/workers")).json["workers"]
            return any(each["name"] == "w2" and each["mark"] == "draining" for each in said)

        await wait_until(is_draining_there, LIMIT)
        before = len(await turns(workers[2]))
        assert [await turn(here, f"fresh-{number}") for number in range(6)] == [200] * 6
        fresh = [
            each for each in (await turns(workers[2]))[before:] if str(each.get("session", "")).startswith("fresh")
        ]
        assert not fresh, "no new session goes there"

        # A session is looked up by its id, explained and closed.
        await page.type("#session", "fresh-0")
        await page.click("#search button")
        await page.until("document.querySelector('.explained').textContent.includes('The session is at w')")
        hash_ = await page.value("document.querySelector('.explained dd').textContent")
        await page.value("document.querySelector('#found').replaceChildren()")
        await page.value("document.querySelector('#session').value = ''")
        await page.type("#session", hash_[:12])  # as the log shows it
        await page.click("#search button")
        await page.until(f"document.querySelector('.explained')?.textContent.includes('{hash_}')")
        await page.click(".explained button.danger")
        await page.until("document.querySelector('#found').textContent.includes('closed')")

        async def is_gone_there() -> bool:
            return (await ask(there.url, target="/admin/session?session=fresh-0")).status == 404

        await wait_until(is_gone_there, LIMIT)
        await page.value("document.querySelector('#session').value = ''")
        await page.type("#at", "w0")
        await page.click("#search button")
        await page.until("document.querySelectorAll('#found tbody tr').length > 0")

        # Sorted and searched by the router, not by the page.
        await page.type("#find", "w2")
        await page.until("document.querySelectorAll('#workers tbody tr').length === 1")

        # The replica goes: the page says so, and stands.
        await page.value("document.querySelector('#find').value = ''")
        await picture(page, "page-1280-full")
        here.process.kill()
        await page.until("document.querySelector('#live').textContent === 'reconnecting'")
        assert await page.value("document.querySelectorAll('#workers tbody tr').length")


async def test_on_a_telephone_whoever_has_no_token_looks_and_who_has_it_acts(
    processes: Processes, tmp_path: Path
) -> None:
    workers = workers_of(processes)
    (replica,) = processes.replicas(1, workers, tmp_path / "claims", f"--admin-token={TOKEN}", *QUICK)
    async with watched(tmp_path, 390, 844) as page, traffic(replica):
        await page.dark()
        await page.open(f"{replica.url}/admin/")
        await page.until("document.querySelectorAll('#workers tbody tr').length === 3")
        await page.until(f"Number({of_row('w0', '.turns')}) > 0")
        assert await page.value("document.documentElement.scrollWidth") == 390, "nothing sticks out"
        hidden = "[...document.querySelectorAll('.whole, #workers td.act button')].every((each) => each.hidden)"
        assert await page.value(hidden)
        assert "http://127.0.0.1" not in await page.value("JSON.stringify(shown)")

        await page.click("#unlock")
        await page.type("#token", "wrong")
        await page.click("#ask button[value=yes]")
        await page.until("document.querySelector('#ask').open && document.querySelector('#ask-said').textContent")
        page.errors.clear()  # the browser's own word on a 403
        await page.type("#token", TOKEN)
        await page.click("#ask button[value=yes]")
        await page.until("!document.querySelector('#events-card').hidden")
        await page.click("[data-worker=w1] button")
        await page.click("#worker [data-act=cordon]")
        await page.until("document.querySelector('#worker-state').textContent === 'cordoned'")
        await page.click("#worker [data-act=uncordon]")
        await page.until("document.querySelector('#worker-state').textContent === 'up'")
        await page.click("#worker form button[type=submit]")
        assert await page.value("document.documentElement.scrollWidth") == 390
        assert await page.value("sessionStorage.length") == 1


MANY = 1000


@contextlib.asynccontextmanager
async def played(claims: Path) -> AsyncIterator[None]:
    """Another replica, of which only the record is there: a hundred sessions at each of the first one's workers, and
    two thousand turns a second."""
    store, rng = await FileStore.open(claims, sync=False), random.Random(1)
    own: Record | None = None

    async def is_written() -> bool:
        nonlocal own
        own = next(map(decode, (await store.registry.list(KIND)).values()), None)
        return own is not None and len(own.workers) == MANY

    def record(beat: int) -> Record:
        assert own is not None
        workers = {
            name: Workers(said.url, 0, (rng.randint(0, 9),), (rng.randint(60, 140),), (rng.randint(0, 160),))
            for name, said in own.workers.items()
        }
        sums = Sums(
            {"cached": 3900 * beat, "created": 100 * beat},
            {"completed": 3999 * beat, "worker_error": beat},
            [0, 0, 0, 0, 0, 2000 * beat, 2000 * beat, *[0] * 10],
            (10**6 * beat, 8 * 10**5 * beat),
        )
        figures = tuple((at, Figures(120.0, at % 3, 1e3, 8e2, 0, 0, (5, 40, 6, 3))) for at in range(0, MANY, 10))
        fields = {"sessions": sum(said.sessions[0] for said in workers.values()), "turns": 4500, "sums": sums}
        who = {"replica": "other", "incarnation": "other", "port": 0, "beat": beat, "at": time.time()}
        return msgspec.structs.replace(own, **who, **fields, workers=workers, figures=figures)

    async def go_on() -> None:
        for beat in itertools.count(1):
            await store.registry.put(KIND, "other", msgspec.json.encode(record(beat)), 10 * STANDS)
            await asyncio.sleep(BEAT)

    await wait_until(is_written, LIMIT)
    playing = asyncio.create_task(go_on())
    try:
        yield
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await store.aclose()


async def test_a_thousand_workers_and_a_hundred_thousand_sessions_are_no_more_to_draw_than_fifty_rows(
    processes: Processes, tmp_path: Path
) -> None:
    named = "\n".join(f'"http://127.1.{at // 250}.{at % 250 + 1}:8000,name=w{at:04}",' for at in range(MANY))
    (tmp_path / "workers.toml").write_text(f"worker = [\n{named}\n]\n")
    claims = tmp_path / "claims"
    options = (f"--workers-from=file://{tmp_path}/workers.toml", "--probe-path=off", "--models-interval=0")
    (replica,) = processes.replicas_with([f"--claims=file://{claims}", *options])
    async with played(claims), watched(tmp_path, 1280) as page:
        await page.open(f"{replica.url}/admin/")
        await page.until("shown.fleet.workers === 1000 && shown.fleet.sessions_most > 90000")
        await page.until("shown.fleet.turns_per_second > 0")
        rows = "[...document.querySelectorAll('#workers tbody tr')]"
        await page.until(f"{rows}.length === 50 && document.querySelector('#page').textContent === 'page 1 of 20'")
        await picture(page, "page-many")

        # A message redraws what it is about: rows that stay keep their nodes, and nothing is animated for ever.
        await page.value(f"{rows}.forEach((row) => {{ row.seen = true; }})")
        await page.value("window.before = shown.at")
        await page.until("shown.at > before + 3")
        assert await page.value(f"{rows}.every((row) => row.seen)")
        endless = "document.getAnimations().filter((each) => each.effect.getComputedTiming().iterations === Infinity)"
        assert await page.value(f"{endless}.length") == 0
        await page.value("window.drawn = 0; window.was = drawWorkers; drawWorkers = () => { drawn++; was(); }; 0")
        moved = "new PointerEvent('pointermove', {clientX: at.x + at.width - 5, clientY: at.y + 5})"
        pointing = f"""(() => {{
            const svg = document.querySelector('#how svg'), at = svg.getBoundingClientRect(), before = drawn;
            svg.dispatchEvent({moved});
            return [drawn - before, document.querySelectorAll('#how .cursor').length];
        }})()"""
        assert await page.value(pointing) == [0, 1], "only that chart is drawn again"
        hide = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}}); 0"
        await page.value("window.drawn = 0; window.before = shown.at; " + hide.format("true"))
        await page.until("shown.at > before")
        assert await page.value("drawn") == 0, "nobody sees it"
        await page.value(hide.format("false"))
        await page.value("document.dispatchEvent(new Event('visibilitychange'))")
        assert await page.value("drawn") > 0

        # Scrolled, turned over, sorted and searched.
        await page.value("scrollTo(0, document.body.scrollHeight)")
        await page.until("document.querySelector('#foot').getBoundingClientRect().bottom <= innerHeight")
        await page.click("#after")
        await page.until("document.querySelector('#page').textContent === 'page 2 of 20'")
        await page.value("document.querySelector('#order').value = 'sessions'")
        await page.value("document.querySelector('#order').dispatchEvent(new Event('change'))")
        numbers = f"{rows}.map((row) => Number(row.querySelector('.amount b').textContent))"
        ordered = f"{numbers}.every((each, at, all) => !at || each <= all[at - 1])"
        await page.until(f"document.querySelector('#page').textContent === 'page 1 of 20' && {ordered}")
        await page.type("#find", "w0777")
        await page.until(f"{rows}.length === 1 && {rows}[0].dataset.worker === 'w0777'")
