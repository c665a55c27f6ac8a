"""What operators see of the fleet: of all replicas, all of it only with the proof, and as changes."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from app.config import Settings
from app.events import KEPT, EventLog
from app.main import Router, create_app
from app.overview import PAGE, Look, changed, merge
from app.page.routes import MOST_LOOKING
from app.top import frame, in_words
from app.up import news
from backends.memory import MemoryStore
from tests.support.fakes import in_virtual_time

TOKEN = "hush"
WORKERS = ("http://10.1.2.3:8000,name=w0", "http://10.1.2.4:8000,name=w1")
ALL, LITTLE = Look(whole=True), Look(whole=False)

keys = st.sampled_from("abcd")
trees = st.recursive(st.integers() | st.text(max_size=2), lambda inner: st.dictionaries(keys, inner), max_leaves=12)
snapshots = st.dictionaries(keys, trees)


@given(snapshots, snapshots)
def test_what_changed_makes_the_one_the_other(before: dict[str, Any], now: dict[str, Any]) -> None:
    kept = copy.deepcopy(before)
    merge(kept, msgspec.json.decode(msgspec.json.encode(changed(before, now))))
    assert kept == now


def test_the_same_changes_nothing() -> None:
    assert changed({"a": {"b": [1, None]}}, {"a": {"b": [1, None]}}) == {}


# --- what happened ---------------------------------------------------------------------------------------------------


def record(level: int, name: str = "coatcheck.fleet", **said: Any) -> logging.LogRecord:
    made = logging.LogRecord(name, level, "file", 1, "worker %s is gone", ("w0",), None)
    made.__dict__.update(said)
    return made


def test_events_are_kept_with_what_they_are_about_and_no_more_of_them_than_that() -> None:
    events = EventLog()
    events.emit(record(logging.WARNING, event="worker_state", fields={"worker": "w0", "turns": 3, "more": [1]}))
    [first] = events.last()
    assert (first.kind, first.level, first.message) == ("worker_state", "warning", "worker w0 is gone")
    assert first.fields == {"worker": "w0", "turns": 3, "more": "[1]"}
    told = msgspec.to_builtins(first)
    assert in_words(told) == "worker w0 is gone"
    assert in_words(told | {"message": "a turn failed"}) == "a turn failed, at w0"
    assert in_words(told | {"fields": {}}) == "worker w0 is gone"
    for _ in range(2 * KEPT):
        events.emit(record(logging.INFO))
        events.emit(record(logging.WARNING, event="turn"))
        events.emit(record(logging.WARNING, event="left_out"))
    assert first in events.last(), "neither small talk nor what single turns cause pushes out an event"
    assert {event.kind for event in events.last()[-3:]} == {"fleet", "turn", "left_out"}
    for _ in range(KEPT):
        events.emit(record(logging.INFO, event="mark"))
    assert len(events.last()) == KEPT
    assert first not in events.last()


def test_up_tells_each_warning_once_and_no_word_of_an_operator() -> None:
    events = EventLog()
    events.emit(record(logging.WARNING, event="worker_state"))
    told = events.last()[-1].number
    for level, kind in (
        (logging.INFO, "worker_state"),
        (logging.WARNING, "mark_set"),
        (logging.WARNING, "mark"),
        (logging.ERROR, "fault"),
        (logging.WARNING, "worker_state"),
    ):
        events.emit(record(level, event=kind))
    shown = {each.number: msgspec.to_builtins(each) for each in reversed(events.last())}
    assert [event["kind"] for event in news(shown, told)] == ["mark", "worker_state"]
    assert news(shown, max(shown)) == []


# --- snapshots -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def routers(*names: str, **settings: Any) -> AsyncIterator[list[Router]]:
    """Over one store; nobody asks their workers anything."""
    store = MemoryStore()
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for name in names:
            plain: dict[str, Any] = {
                "claims": "memory://",
                "probe_path": "off",
                "models_interval": 0,
                "worker": WORKERS,
            }
            app = create_app(Settings.flat(**{**plain, "replica": name, **settings}), store=store)
            await stack.enter_async_context(app.router.lifespan_context(app))
            made.append(app)
        yield made
    await store.aclose()


def serve_a_turn(app: Router, worker: str, outcome: Any = "completed") -> None:
    """As far as the counters notice."""
    found = app.fleet.worker(worker)
    assert found is not None
    found.cells.turns[outcome, 200] += 1
    found.cells.ttft.observe(0.2)
    app.metrics.turn("m", outcome)
    app.metrics.affinity.inc("cached")
    app.metrics.ttft.observe(0.2)


@in_virtual_time
async def test_numbers_are_of_all_replicas() -> None:
    async with routers("a", "b") as (a, b):
        await asyncio.sleep(5)
        for _ in range(6):
            serve_a_turn(a, "w0")
        for _ in range(3):
            serve_a_turn(b, "w0")
        serve_a_turn(b, "w1", "worker_error")
        await asyncio.sleep(6)
        for app in (a, b):
            shown = app.overview.snapshot(ALL)
            fleet = shown["fleet"]
            assert (fleet["turns"], fleet["failed"], fleet["failed_percent"]) == (10, 1, 10.0)
            assert (fleet["kept_percent"], fleet["replicas"], fleet["agree"]) == (100.0, 2, True)
            assert 100 < fleet["ttft_p50_ms"] < 250
            assert sum(row[1] for row in shown["chart"].values()) == 10, shown["slot"]["series"]
            rows = shown["workers"]["rows"]
            assert rows["w0"]["turns_per_minute"] > rows["w1"]["turns_per_minute"] > 0


@in_virtual_time
async def test_when_traffic_stops_the_figures_are_unknown_also_in_a_terminal() -> None:
    async with routers("a") as (a,):
        await asyncio.sleep(5)
        quiet = a.overview.snapshot(ALL)
        serve_a_turn(a, "w0")
        await asyncio.sleep(6)
        shown = copy.deepcopy(a.overview.snapshot(ALL))
        assert shown["fleet"]["kept_percent"] == 100.0
        merge(shown, changed(shown, quiet))
        assert "kept_percent" not in shown["fleet"]
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(frame(shown, 80, 40))
        assert "– kept" in console.export_text()


@in_virtual_time
async def test_a_fault_in_one_look_does_not_end_the_others() -> None:
    async with routers("a") as (a,):
        worker = a.fleet.worker("w0")
        assert worker is not None
        await asyncio.sleep(5)
        serve_a_turn(a, "w0")
        stream = a.overview.follow(ALL)
        await anext(stream)
        kept, worker.cells.ttft = worker.cells.ttft, None  # type: ignore[assignment]
        await asyncio.sleep(20)
        worker.cells.ttft = kept
        worker.cells.prompt_tokens = 2**70  # what a worker says is believed as far as it can be counted
        async with asyncio.timeout(60):
            while "cached_percent" not in (await anext(stream))[1].get("fleet", {}):
                pass
        await stream.aclose()  # type: ignore[attr-defined]


def texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*map(texts, value), *map(texts, value.values()))
    if isinstance(value, list):
        return set().union(*map(texts, value))
    return {value} if isinstance(value, str) else set()


@in_virtual_time
async def test_without_the_proof_nobody_sees_more_than_the_metrics_tell() -> None:
    async with routers("a", "b", admin_token=TOKEN) as (a, _):
        await asyncio.sleep(5)
        worker = a.fleet.worker("w0")
        assert worker is not None
        worker.health.failed("status 500 at http://10.1.2.3:8000/v1 of tenant-x")
        logging.getLogger("coatcheck.test").warning("session 5e55 of tenant-x moved")
        a.overview.tick()
        whole, little = a.overview.snapshot(ALL), a.overview.snapshot(LITTLE)
        assert any("10.1.2.3" in text for text in texts(whole))
        assert any("tenant-x" in text for text in texts(whole["events"]))
        assert not {"events", "tenants", "absent", "troubles"} & little.keys()
        secret = ("10.1.2.3", "tenant-x", "5e55", "127.0.0.1", "status 500")
        assert not [text for text in texts(little) if any(word in text for word in secret)]
        assert little["workers"]["rows"]["w0"]["state"] == "up"
        assert a.overview.snapshot(Look(whole=False, find="10.1.2.3"))["workers"]["found"] == 0, "nor by guessing"


@in_virtual_time
async def test_a_large_fleet_is_shown_in_pages_and_found_by_name() -> None:
    many = tuple(f"http://10.9.{n // 200}.{n % 200}:1,name=big-{n:03}" for n in range(130))
    async with routers("a", worker=many) as (a,):
        await asyncio.sleep(3)
        first = a.overview.snapshot(Look(whole=True, order="name"))["workers"]
        assert (len(first["rows"]), first["pages"], first["found"]) == (PAGE, 3, 130)
        last = a.overview.snapshot(Look(whole=True, order="name", page=99))["workers"]
        assert (last["page"], last["order"][-1]) == (2, "big-129")
        sick = a.fleet.worker("big-077")
        assert sick is not None
        sick.health.unreachable("connection refused", refused=True)
        a.overview.tick()
        assert a.overview.snapshot(ALL)["workers"]["order"][0] == "big-077", "trouble comes first"
        found = a.overview.snapshot(Look(whole=True, find="DOWN"))["workers"]
        assert found["order"] == ["big-077"]
        assert found["rows"]["big-077"]["why"] == "connection refused"


@in_virtual_time
async def test_who_looks_is_told_what_changes_and_costs_nothing_afterwards() -> None:
    async with routers("a") as (a,):
        stream = a.overview.follow(ALL)
        name, shown = await anext(stream)
        assert (name, a.overview.looking) == ("snapshot", 1)
        shown = copy.deepcopy(shown)
        worker = a.fleet.worker("w1")
        assert worker is not None
        worker.health.unreachable("connection refused", refused=True)
        serve_a_turn(a, "w0")
        for _ in range(3):
            name, changes = await anext(stream)
            assert name == "change"
            merge(shown, changes)
        assert shown["workers"]["rows"]["w1"]["state"] == "down"
        assert shown == msgspec.json.decode(msgspec.json.encode(a.overview.snapshot(ALL)))
        await stream.aclose()  # type: ignore[attr-defined]
        assert a.overview.looking == 0


# --- over HTTP -------------------------------------------------------------------------------------------------------


def client(app: Any, peer: str = "127.0.0.1", host: str = "localhost") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(peer, 1))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}")


@in_virtual_time
async def test_the_pages_files_run_nothing_else_and_are_framed_by_nobody() -> None:
    async with routers("a") as (a,), client(a) as here:
        page = await here.get("/admin/")
        assert page.status_code == 200
        for path in ("page.css", "page.js", "icon.svg"):
            assert path in page.text
            answer = await here.get(f"/admin/{path}")
            assert (answer.status_code, answer.headers["x-content-type-options"]) == (200, "nosniff")
            again = await here.get(f"/admin/{path}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            # So that it works behind any prefix, and loads from nowhere else.
            assert not re.search(r"""(fetch\(|ask\("\w+", )\s*["'`]/|url\(|://""", _without_namespace(answer.text))
        assert not [
            word for word in ('href="/', 'src="/', "://", "<style", " style=", " onclick=") if word in page.text
        ]
        policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert {policy["script-src"], policy["style-src"], policy["connect-src"]} == {"'self'"}
        slash = await here.get("/admin")
        assert (slash.status_code, slash.headers["location"]) == (307, "admin/")


def _without_namespace(text: str) -> str:
    return text.replace("http://www.w3.org/2000/svg", "")


@in_virtual_time
async def test_who_may_look_and_who_may_not() -> None:
    async with routers("a") as (a,), client(a, host="evil.example") as rebound, client(a, "10.0.0.9") as far:
        for stranger in (rebound, far):
            for path in ("/admin/", "/admin/page.js", "/admin/stream"):
                assert (await stranger.get(path)).status_code == 403
    async with routers("a", admin_token=TOKEN) as (a,), client(a, "10.0.0.9", host="router.example") as far:
        assert (await far.get("/admin/")).status_code == 200
        assert (await far.get("/admin/stream", headers={"x-coatcheck-admin-token": "wrong"})).status_code == 403
        for path in ("/admin/workers", "/admin/sessions", "/admin/session?session=s", "/admin/replicas"):
            assert (await far.get(path)).status_code == 403, "those are for who has the token"


@pytest.mark.parametrize("token", ["", TOKEN])
def test_no_other_sites_page_can_have_anything_done(token: str) -> None:
    @in_virtual_time
    async def run() -> None:
        async with routers("a", admin_token=token) as (a,), client(a) as here:
            given = {"x-coatcheck-admin-token": token} if token else {}
            for method, path in (
                ("POST", "/admin/workers/w0/drain"),
                ("POST", "/admin/workers/w0/release"),
                ("DELETE", "/admin/session?session=s"),
            ):
                for site in ("cross-site", "same-site"):
                    refused = await here.request(method, path, headers={**given, "sec-fetch-site": site})
                    assert refused.status_code == 403
                done = await here.request(method, path, headers={**given, "sec-fetch-site": "same-origin"})
                assert done.status_code == 200, done.text
            worker = a.fleet.worker("w0")
            assert worker is not None
            assert worker.mark == "draining"

    run()


@in_virtual_time
async def test_only_so_many_look_at_once() -> None:
    async with routers("a") as (a,), client(a) as here:
        a.overview.looking = MOST_LOOKING
        assert (await here.get("/admin/stream")).status_code == 503


@in_virtual_time
async def test_strangers_leave_seats_to_admins_and_a_head_ends() -> None:
    async with routers("a", admin_token=TOKEN) as (a,), client(a, "10.0.0.9") as far, asyncio.timeout(60):
        a.overview.looking = MOST_LOOKING - 10
        assert (await far.head("/admin/stream")).status_code == 503
        said = await far.head("/admin/stream", headers={"x-coatcheck-admin-token": TOKEN})
        assert (said.status_code, said.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
