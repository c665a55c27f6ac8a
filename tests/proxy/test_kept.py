"""What only its maker knows is found again: at mock workers, which answer 404 for what another one keeps, through two
replicas, without a session unless a test is about that."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backends.base import StoreUnavailable
from mocker import cli
from mocker.server import create_mock
from mocker.settings import MockSettings
from tests.support.bench import SESSION, bench
from tests.support.http_model import Request
from tests.support.raw import END, STREAM, Peer, Worker, answers, chunk, to_each, until
from tests.support.room import JSON, Room, Rooms, Turn, over_one

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

FORM = {"content-type": "multipart/form-data; boundary=b"}


def form(content: bytes) -> bytes:
    return (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + content + b"\r\n--b--\r\n"
    )


class Client:
    """Asks the replicas in turn, so that no two requests in a row reach the same one."""

    def __init__(self, room: Room, stops: dict[str, asyncio.Event], **how: Any) -> None:
        self.room, self.stops, self._how, self.asked = room, stops, how, 0

    def ways(self, fields: dict[str, Any] | None, how: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        how = {"at": self.asked % 2, "headers": {}, "body": b"", **self._how, **how}
        if fields is not None:
            how["headers"] = how["headers"] | JSON
            how["body"] = json.dumps(fields).encode()
        return how

    async def ask(self, method: str, path: str, fields: dict[str, Any] | None = None, **how: Any) -> Turn:
        return await self.room.turn(method=method, path=path, **self.ways(fields, how))

    async def ok(self, method: str, path: str, fields: dict[str, Any] | None = None, **how: Any) -> Turn:
        turn = await self.ask(method, path, fields, **how)
        assert turn.status == 200, (method, path, turn.status, turn.body)
        return turn

    async def respond(self, said: str = "hi", **fields: Any) -> Turn:
        session = fields.pop("session", None)
        fields = {"model": "mock-model", "input": said, "max_output_tokens": 2, **fields}
        return await self.ok("POST", "/v1/responses", fields, session=session)

    async def upload(self) -> Turn:
        return await self.ok("POST", "/v1/files", headers=FORM, body=form(json.dumps(self.line).encode()))

    @property
    def line(self) -> dict[str, Any]:
        body = {"model": "mock-model", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        return {"custom_id": "1", "url": "/v1/chat/completions", "body": body}

    def kept(self, outcome: str) -> int:
        return sum(app.metrics.kept.cells[outcome,] for app in self.room.replicas)


@contextlib.asynccontextmanager
async def clients(rooms: Rooms, *, workers: int = 3, **settings: Any) -> AsyncIterator[Client]:
    """A room in front of mock workers m0, m1 ..., which take turns."""
    stops: dict[str, asyncio.Event] = {}
    spoken, tasks = [], []
    for number in range(workers):
        name, listener = f"m{number}", cli.listen("127.0.0.1", 0)
        mock = create_mock(MockSettings(name=name, ttft_ms=1, itl_ms=1))
        stops[name] = asyncio.Event()
        tasks.append(asyncio.create_task(cli.serve([(mock, listener)], stops[name])))
        spoken.append(f"http://127.0.0.1:{listener.getsockname()[1]},name={name}")
    try:
        async with rooms.open(workers=0, worker=tuple(spoken), policy="round-robin", **settings) as room:
            yield Client(room, stops)
    finally:
        for stop in stops.values():
            stop.set()
        await asyncio.wait(tasks, timeout=5)


def sse(turn: Turn) -> list[dict[str, Any]]:
    return [json.loads(line[5:]) for line in turn.body.split(b"\n") if line.startswith(b"data:")]


async def responses(client: Client) -> None:
    made = await client.respond()
    own, maker = made.json["id"], made.worker
    path = f"/v1/responses/{own}"
    for _ in range(4):
        assert (await client.ok("GET", path)).json["id"] == own
        assert (await client.ok("GET", f"{path}/input_items")).worker == maker
        then = await client.respond("and", previous_response_id=own)
        assert then.worker == maker
        own, path = then.json["id"], f"/v1/responses/{then.json['id']}"
    assert (await client.ok("DELETE", path)).json["deleted"]


async def streamed_responses(client: Client) -> None:
    made = await client.respond(stream=True)
    own = sse(made)[0]["response"]["id"]
    assert sse(made)[-1]["type"] == "response.incomplete"  # by its limit of tokens
    for _ in range(4):
        assert (await client.ok("GET", f"/v1/responses/{own}")).worker == made.worker
    then = await client.respond(stream=True, previous_response_id=own)
    assert then.worker == made.worker


async def background_responses(client: Client) -> None:
    for stream in (False, True):
        made = await client.respond(background=True, stream=stream, max_output_tokens=30)
        path = f"/v1/responses/{sse(made)[0]['response']['id'] if stream else made.json['id']}"
        assert (await client.ok("GET", path)).worker == made.worker
        whole = await client.ok("GET", path, query=b"stream=true")
        resumed = await client.ok("GET", path, query=b"stream=true&starting_after=2")
        assert 0 < len(sse(resumed)) < len(sse(whole))
        assert sse(whole)[-len(sse(resumed)) :] == sse(resumed)
        assert (await client.ok("POST", f"{path}/cancel")).worker == made.worker


async def files(client: Client) -> None:
    made = await client.upload()
    path = f"/v1/files/{made.json['id']}"
    for _ in range(4):
        assert (await client.ok("GET", path)).worker == made.worker
        assert json.loads((await client.ok("GET", f"{path}/content")).body) == client.line
    await client.ok("DELETE", path)


async def batches(client: Client) -> None:
    for cancelled in (False, True):
        file = await client.upload()
        asked = {"input_file_id": file.json["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        for _ in range(3):
            made = await client.ok("POST", "/v1/batches", asked)
            assert made.worker == file.worker
        path = f"/v1/batches/{made.json['id']}"
        if cancelled:
            assert (await client.ask("POST", f"{path}/cancel")).status in (200, 409)  # it may have ended
            continue
        async with asyncio.timeout(10):
            while (looked := await client.ok("GET", path)).json["status"] != "completed":
                await asyncio.sleep(0.01)
        for _ in range(3):
            result = await client.ok("GET", f"/v1/files/{looked.json['output_file_id']}/content")
            assert result.worker == file.worker


async def conversations(client: Client) -> None:
    made = await client.ok("POST", "/v1/conversations", {"metadata": {"a": "b"}})
    own = made.json["id"]
    path = f"/v1/conversations/{own}"
    for _ in range(2):
        assert (await client.ok("GET", path)).json["metadata"] == {"a": "b"}
        await client.ok("POST", path, {"metadata": {"a": "b"}})
        await client.ok("POST", f"{path}/items", {"items": [{"role": "user", "content": "hi"}]})
        items = (await client.ok("GET", f"{path}/items")).json["data"]
        assert (await client.ok("GET", f"{path}/items/{items[0]['id']}")).worker == made.worker
        assert (await client.respond(conversation=own)).worker == made.worker
        assert (await client.respond(conversation={"id": own})).worker == made.worker
        await client.ok("DELETE", f"{path}/items/{items[0]['id']}")
    await client.ok("DELETE", path)


CALLS = (responses, streamed_responses, background_responses, files, batches, conversations)


@over_one
@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.__name__)
async def test_what_a_worker_keeps_is_found_at_every_replica(rooms: Rooms, calls: Any) -> None:
    async with clients(rooms) as client:
        await calls(client)
        assert client.kept("unknown") == client.kept("alone") == client.kept("unread") == 0


async def test_it_is_found_the_moment_that_its_id_is_known(rooms: Rooms) -> None:
    async with clients(rooms) as client:

        async def one(number: int) -> None:
            stream = number % 2 == 0
            fields = {"model": "mock-model", "input": "hi", "stream": stream, "max_output_tokens": 2}
            turn = client.room.start(method="POST", path="/v1/responses", **client.ways(fields, {"at": 0}))
            await until(lambda: b'"id":"resp_' in turn.body)
            own = turn.body.partition(b'"id":"')[2].partition(b'"')[0].decode()
            looked = await client.ok("GET", f"/v1/responses/{own}", at=1)
            await turn.finish()
            assert looked.worker == turn.worker

        for start in range(0, 30, 10):
            await asyncio.gather(*map(one, range(start, start + 10)))


@over_one
async def test_its_id_is_claimed_before_the_client_sees_it(rooms: Rooms) -> None:
    async with clients(rooms, replicas=1) as client:
        store = client.room.stores[0]
        for stream in (False, True):
            store.before["create"] = asyncio.Event()
            fields = {"model": "mock-model", "input": "hi", "stream": stream}
            turn = client.room.start(method="POST", path="/v1/responses", **client.ways(fields, {"at": 0}))
            calls = store.calls["create"]
            await until(lambda calls=calls: store.calls["create"] > calls)  # type: ignore[misc]
            assert not turn.body
            store.before.pop("create").set()
            assert (await turn.finish()).status == 200


@over_one
async def test_what_is_not_stored_is_not_claimed(rooms: Rooms) -> None:
    async with clients(rooms) as client:
        await client.respond(store=False)
        await client.ask("POST", "/v1/responses", {"model": "mock-model", "input": 5})
        await client.ok("GET", "/v1/files")
        assert client.room.calls()["create"] == 0


async def test_what_is_deleted_is_known_no_more(rooms: Rooms) -> None:
    async with clients(rooms) as client:
        path = f"/v1/files/{(await client.upload()).json['id']}"
        await client.ok("GET", path)
        await client.ok("DELETE", path)
        await until(lambda: not any(app.affinity.pending_closes for app in client.room.replicas))
        followed = client.kept("followed")
        for _ in range(2):
            looked = await client.ask("GET", path)
            assert (looked.status, looked.how) == (404, "none")
            assert "No such File" in looked.json["error"]["message"]  # in the worker's words
        assert client.kept("followed") == followed


@over_one
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_is_kept_goes_before_the_session(rooms: Rooms, method: str) -> None:
    async with clients(rooms) as client:
        first = await client.respond(session="s")
        other = await client.respond()
        while other.worker == first.worker:
            other = await client.respond()
        if method == "GET":
            await client.ok("GET", f"/v1/responses/{other.json['id']}", session="s")
        else:
            assert (await client.respond(previous_response_id=other.json["id"], session="s")).worker == other.worker
        assert client.kept("past_session") == 1
        assert (await client.respond(session="s")).worker == first.worker
        # A session that is new begins where that is.
        for _ in range(3):
            session = client.room.new()
            then = await client.respond(previous_response_id=other.json["id"], session=session)
            assert (then.worker, then.how) == (other.worker, "created")
            assert (await client.respond(session=session)).worker == other.worker


@over_one
async def test_a_final_turn_that_follows_an_id_ends_its_session(rooms: Rooms) -> None:
    async with clients(rooms) as client:
        for stream in (False, True):
            made = await client.respond(session="s")
            fields = {"model": "mock-model", "input": "x", "stream": stream, "previous_response_id": made.json["id"]}
            last = await client.ok("POST", "/v1/responses", fields, session="s", final=True)
            assert await client.room.claim("s") is None
            own = sse(last)[0]["response"]["id"] if stream else last.json["id"]
            assert (await client.ok("GET", f"/v1/responses/{own}")).worker == made.worker


@over_one
async def test_tenants_never_reach_what_another_one_keeps(rooms: Rooms) -> None:
    file, (mine, theirs) = rooms.keys("a", "b")
    async with clients(rooms, workers=1, api_keys=str(file)) as client:
        fields = {"model": "mock-model", "input": "hi"}
        own = (await client.ok("POST", "/v1/responses", fields, key=mine)).json["id"]
        for _ in range(2):
            assert (await client.ok("GET", f"/v1/responses/{own}", key=mine)).json["id"] == own
            stranger = await client.ask("GET", f"/v1/responses/{own}", key=theirs)
            assert stranger.refusal == (404, "not_found")
            stranger = await client.ask("POST", "/v1/responses", fields | {"previous_response_id": own}, key=theirs)
            assert stranger.refusal == (404, "not_found")
            assert stranger.json["error"]["param"] == "previous_response_id"
            stranger = await client.ask("DELETE", f"/v1/responses/{own}", key=theirs)
            assert stranger.refusal == (404, "not_found")
        store = client.room.stores
        for each in store:
            each.broken["all"] = StoreUnavailable("away")
        stranger = await client.ask("GET", f"/v1/responses/{own}", key=theirs)
        assert stranger.refusal == (503, "store_unavailable")
        for each in store:
            each.broken.clear()
        await until(lambda: all(app.affinity.state.value == "up" for app in client.room.replicas))


@over_one
async def test_it_is_gone_with_its_worker(rooms: Rooms) -> None:
    async with clients(rooms) as client:
        made = await client.respond()
        path = f"/v1/responses/{made.json['id']}"
        assert made.worker is not None
        client.stops[made.worker].set()
        await asyncio.sleep(0.1)
        fields = {"model": "mock-model", "input": "x", "previous_response_id": made.json["id"]}
        for at in (0, 1):
            looked = await client.ask("GET", path, at=at)
            assert looked.refusal == (404, "gone")
            assert looked.said("x-should-retry") == "false"
            assert (await client.ask("POST", "/v1/responses", fields, at=at)).refusal == (404, "gone")
        # A session goes on without it.
        assert (await client.respond(session="s")).status == 200


@over_one
async def test_while_the_store_is_away_workers_are_asked(rooms: Rooms) -> None:
    async with clients(rooms) as client:
        before = [await client.respond() for _ in range(3)]
        for store in client.room.stores:
            store.broken["all"] = StoreUnavailable("away")
        during = [await client.ok("POST", "/v1/responses", {"model": "mock-model", "input": "x"}) for _ in range(3)]
        for made in (*before, *during):
            for at in (0, 1):
                looked = await client.ok("GET", f"/v1/responses/{made.json['id']}", at=at)
                assert looked.worker == made.worker
                fields = {"model": "mock-model", "input": "x", "previous_response_id": made.json["id"]}
                then = await client.ok("POST", "/v1/responses", fields, at=at)
                assert then.worker == made.worker
        assert (await client.ask("GET", "/v1/responses/resp_none")).status == 404
        assert client.kept("alone") > 0
        for store in client.room.stores:
            store.broken.clear()
        await until(lambda: all(app.affinity.state.value == "up" for app in client.room.replicas))
        unknown = client.kept("unknown")
        for made in during:
            for at in (0, 1):
                assert (await client.ok("GET", f"/v1/responses/{made.json['id']}", at=at)).worker == made.worker
        assert client.kept("unknown") == unknown


async def test_an_id_that_is_given_again_is_its_latest_makers() -> None:
    def serve(name: bytes) -> Any:
        async def answer(peer: Peer, request: Request) -> None:
            body = b'{"id": "file-1", "by": "%b"}' % name
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            await peer.send(b"content-length: %d\r\n\r\n" % len(body) + body)

        return to_each(answer)

    async with bench(serve(b"w0"), serve(b"w1")) as made:
        for _ in range(4):
            call = await made.get(path="/v1/files", body=b"{}")
            looked = await made.get(path="/v1/files/file-1", method="GET", body=b"")
            assert looked.json["by"] == call.json["by"]


async def test_an_answer_that_says_no_id_goes_by() -> None:
    rows = {
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n[]": b"[]",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok": b"ok",
        b'HTTP/1.1 400 X\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{"id":"a"}': b'{"id":"a"}',
        STREAM + chunk(b": ping\n\n") + chunk(b"data: 1\n\n") + END: b": ping\n\ndata: 1\n\n",
        STREAM + chunk(b'data: {"id": ') + chunk(b'"a"}\n') + chunk(b"\n") + END: b'data: {"id": "a"}\n\n',
    }
    for said, body in rows.items():

        async def answer(peer: Peer, request: Request, said: bytes = said) -> None:
            await peer.send(said)

        async with bench(to_each(answer)) as made:
            call = await made.get(path="/v1/responses", body=b"{}")
            assert call.body == body


async def test_a_stream_that_breaks_before_its_id_is_told_as_broken() -> None:
    async def answer(peer: Peer, request: Request) -> None:
        await peer.send(STREAM + chunk(b'data: {"type": '))
        peer.reset()

    async with bench(to_each(answer)) as made:
        call = await made.get(path="/v1/responses", body=b"{}")
        assert call.body.startswith(b'data: {"type": ')
        await until(lambda: made.outcomes()["broken"] == 1)


@pytest.mark.parametrize("call", ["compact", "input_tokens", "render"])
async def test_a_call_that_stands_where_an_id_would_goes_with_its_session(call: str) -> None:
    """And not to one worker after the other, until one knows it."""
    no = b"HTTP/1.1 404 X\r\ncontent-length: 2\r\n\r\nno"
    workers = [Worker(answers(no)), Worker(answers(no))]
    async with bench(*workers) as b:
        await b.get(SESSION)
        for _ in range(3):
            assert (await b.get(SESSION, path=f"/v1/responses/{call}")).status == 404
        assert sorted(len(worker.requests) for worker in workers) == [0, 4]
        assert not b.metrics.kept.cells["unknown",]
