"""The operators' page in a real browser, before real replicas and workers: `make test-browser`.

What the page says is compared with what the workers recorded and the other replica answers. `PICTURES=FOLDER` keeps
pictures of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

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
