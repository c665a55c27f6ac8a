"""Spans of turns, as a receiver of OTLP gets them, and the context that a worker is sent."""

from __future__ import annotations

import http.server
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from mocker.settings import HandoverKind, KvTransfer
from tests.support.phased import phased
from tests.support.raw import DONE, END, STREAM, Live, Peer, answers, chunk, echoes, post, until

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])  # the router has its own
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = bytes.fromhex("0af7651916cd43dd8448eb211c80319c")
SAID = (b"traceparent: " + PARENT, b"tracestate: vendor=1,other=2")
SESSION = b"x-dynamo-session-id: s"


class Receiver:
    """Takes OTLP over HTTP; in a thread, because the exporter knows nothing of loops."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: set[str] = set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.paths.add(self.path)
                outer.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def spans(self, request: str) -> dict[str, list[Span]]:
        """Those of a turn with that request id, by their names, in the order in which they began."""
        all_spans = [s for r in self.requests for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]
        turns = [span for span in all_spans if attributes(span).get("coatcheck.request_id") == request]
        found: dict[str, list[Span]] = {}
        for turn in turns:
            children = [span for span in all_spans if span.parent_span_id == turn.span_id]
            for span in sorted([turn, *children], key=lambda span: span.start_time_unix_nano):
                found.setdefault("turn" if span is turn else span.name, []).append(span)
        return found


def attributes(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in span.attributes}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def router(receiver: Receiver) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with Live(otel_endpoint=receiver.url, absent=1, policy="round-robin", replica="east") as live:
            yield live


async def told(receiver: Receiver, request: bytes) -> dict[str, list[Span]]:
    name = request.decode()
    await until(lambda: receiver.spans(name))
    return receiver.spans(name)


async def turn(router: Live, request: bytes, *lines: bytes) -> Any:
    async with router.client() as client:
        await client.send(post(b"x-request-id: " + request, *lines, body=b'{"model": "m"}'))
        return await client.answer()


async def test_a_turn_its_binding_and_its_attempts_are_told(router: Live, receiver: Receiver) -> None:
    """The first one meets a worker that nobody is at, so that it goes on at the other."""
    async with router.worker(echoes) as worker:
        for number in range(2):
            assert (await turn(router, b"first-%d" % number, SESSION, *SAID)).status == 200
        heads = [head.lower() for head in worker.heads]
    spans = await told(receiver, b"first-0")
    (span,) = spans["turn"]
    assert span.name == "POST /v1/x"
    assert (span.trace_id, span.parent_span_id.hex()) == (TRACE, "b7ad6b7169203331")
    assert span.trace_state == "vendor=1,other=2"
    said = attributes(span)
    assert said.pop("coatcheck.first_byte_seconds") > 0
    assert len(said.pop("coatcheck.session")) == 12
    assert said == {
        "http.request.method": "POST",
        "url.path": "/v1/x",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "coatcheck.request_id": "first-0",
        "coatcheck.outcome": "completed",
        "coatcheck.attempts": 2,
        "coatcheck.worker": "w1",
        "coatcheck.affinity": "rebound",
        "gen_ai.request.model": "m",
    }
    assert [attributes(each)["coatcheck.affinity"] for each in spans["binding"]] == ["created", "rebound"]
    lost, kept = spans["attempt"]
    assert attributes(lost) == {"coatcheck.worker": "w0", "error.type": "ConnectRefused"}
    assert lost.status.code == Status.STATUS_CODE_ERROR
    assert attributes(kept) == {
        "coatcheck.worker": "w1", "http.request.resend_count": 1, "http.response.status_code": 200,
    }  # fmt: skip
    assert kept.status.code == Status.STATUS_CODE_UNSET
    assert {each.trace_id for each in (lost, kept, *spans["binding"])} == {TRACE}
    steps = sorted([*spans["binding"], *spans["attempt"]], key=lambda each: each.start_time_unix_nano)
    for before, after in itertools.pairwise(steps):
        assert before.end_time_unix_nano <= after.start_time_unix_nano
    assert span.start_time_unix_nano <= steps[0].start_time_unix_nano
    assert steps[-1].end_time_unix_nano <= span.end_time_unix_nano
    # The worker goes on from the attempt.
    assert heads[0].count(b"traceparent") == 1
    assert b"\r\ntraceparent: 00-%b-%b-01\r\n" % (TRACE.hex().encode(), kept.span_id.hex().encode()) in heads[0]
    assert b"\r\ntracestate: vendor=1,other=2\r\n" in heads[0]
    # A known session is not moved again.
    spans = await told(receiver, b"first-1")
    assert attributes(spans["turn"][0])["coatcheck.affinity"] in ("cached", "stored")
    assert len(spans["attempt"]) == len(spans["binding"]) == 1
    assert receiver.paths == {"/v1/traces"}
    resource = {
        each.key: each.value.string_value for each in receiver.requests[0].resource_spans[0].resource.attributes
    }
    assert (resource["service.name"], resource["service.instance.id"]) == ("coatcheck", "east")


async def test_a_turn_without_a_context_begins_a_trace(router: Live, receiver: Receiver) -> None:
    async with router.worker(echoes) as worker:
        assert (await turn(router, b"alone")).status == 200
        head = worker.heads[0].lower()
    spans = await told(receiver, b"alone")
    assert spans["turn"][0].parent_span_id == b""
    assert b"traceparent: 00-%b-" % spans["turn"][0].trace_id.hex().encode() in head


async def test_an_answer_that_breaks_off_and_a_turn_that_is_refused_are_errors(
    router: Live, receiver: Receiver
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM + chunk(b"data: 1\n\n"))
        peer.reset()

    async with router.worker(script):
        assert not (await turn(router, b"broken")).complete
    spans = await told(receiver, b"broken")
    assert attributes(spans["turn"][0])["coatcheck.outcome"] == "broken"
    assert [each.status.code for each in (spans["turn"][0], spans["attempt"][-1])] == [Status.STATUS_CODE_ERROR] * 2

    async with router.worker(answers(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n")):
        assert (await turn(router, b"error")).status == 500
    spans = await told(receiver, b"error")
    assert attributes(spans["turn"][0])["http.response.status_code"] == 500
    assert attributes(spans["attempt"][-1])["http.response.status_code"] == 500
    assert spans["turn"][0].status.code == Status.STATUS_CODE_ERROR

    assert (await turn(router, b"refused", b"x-dynamo-session-id: two words")).status == 400
    spans = await told(receiver, b"refused")
    assert (attributes(spans["turn"][0])["http.response.status_code"], list(spans)) == (400, ["turn"])
    assert spans["turn"][0].status.code == Status.STATUS_CODE_UNSET, "the client's own"


async def test_what_is_not_sampled_is_not_told_and_the_worker_hears_so(router: Live, receiver: Receiver) -> None:
    async with router.worker(echoes) as worker:
        await turn(router, b"silent", b"traceparent: " + PARENT[:-2] + b"00")
        head = worker.heads[0].lower()
        assert (await turn(router, b"after")).status == 200
    assert b"\r\ntraceparent: 00-%b-" % TRACE.hex().encode() in head
    assert b"-00\r\n" in head
    await told(receiver, b"after")
    assert not receiver.spans("silent")


async def test_without_tracing_the_context_passes_as_it_came() -> None:
    with Live() as plain:
        async with plain.worker(echoes) as worker, plain.client() as client:
            await client.send(post(*SAID, b"baggage: a=1"))
            assert (await client.answer()).status == 200
    for line in (*SAID, b"baggage: a=1"):
        assert b"\r\n%b\r\n" % line in worker.heads[0]


async def test_a_receiver_that_is_not_there_delays_no_turn_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with Live(otel_endpoint="http://127.0.0.1:9") as live:  # nobody is
        async with live.worker(to_each_stream), live.client() as client:
            for _ in range(20):
                await client.send(post())
                assert (await client.answer()).complete


async def to_each_stream(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.send(STREAM + chunk(DONE) + END)


@pytest.mark.parametrize("handover", ["vllm", "sglang"])
async def test_a_turn_in_two_phases_has_a_span_for_each(receiver: Receiver, handover: HandoverKind) -> None:
    mock = {"transfer": KvTransfer(handover=handover)}
    name = f"phases-{handover}"
    async with phased(prefill=1, decode=1, replicas=1, otel_endpoint=receiver.url, mock=mock) as room:
        assert (await room.turn("s", headers=[("x-request-id", name)])).status == 200
    spans = await told(receiver, name.encode())
    (prefill,), (decode,) = spans["prefill"], spans["attempt"]
    assert attributes(prefill) == {"coatcheck.worker": "p0", "http.response.status_code": 200}
    assert attributes(decode) == {"coatcheck.worker": "d0", "http.response.status_code": 200}
    first_ends, second_begins = prefill.end_time_unix_nano, decode.start_time_unix_nano
    assert (first_ends <= second_begins) == (handover == "vllm")
    (turn,) = spans["turn"]
    assert attributes(turn)["coatcheck.worker"] == "d0"
