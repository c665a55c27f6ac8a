"""What a worker does of a turn, before any turn is sent: who says so, who may be chosen, and what it serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import pytest
from pydantic import ValidationError

from app.config import Settings
from app.errors import TurnError
from app.fleet.discovery.file import read_workers
from app.fleet.discovery.marks import OperatorMark
from app.fleet.discovery.records import WorkerRecord, decode_record, encode_record
from app.fleet.specs import Phase, WorkerError, lacking_phase, worker_spec, worker_specs
from app.fleet.workers import Fleet, Target, Worker, make_worker
from app.http.exchange import Exchange
from app.http.inplace import Wake
from app.http.worker import Sink, WorkerConnection
from app.sessions.identity import Identifier
from app.turn.handovers import Halves, NoHandover, Parts, handover_in, split, worded
from app.turn.meeting import Meeting
from app.turn.phases import spoken
from app.turn.prompts import SplitRequest
from app.turn.request import Reading, Request
from app.turn.retry import Attempt
from tests.support.fakes import in_virtual_time
from tests.support.rows import rows
from tests.unit.test_catalog import Workers, catalog_of, learnt, serving


def worker(name: str, phase: Phase = "both") -> Worker:
    loop = asyncio.get_running_loop()
    return make_worker(f"http://{name}:1", name=name, phase=phase, connect_limit=1, idle_limit=1, clock=loop.time)


def fleet_of(**phases: Phase) -> Fleet:
    return Fleet((worker(name, phase) for name, phase in phases.items()), clock=asyncio.get_running_loop().time)


def names(targets: Iterable[Target]) -> list[str]:
    return sorted(target.worker.name for target in targets)


def test_whoever_names_a_worker_says_what_it_does_of_a_turn() -> None:
    assert worker_spec("http://a:1").phase == "both"
    assert worker_spec("http://a:1,name=x,phase=prefill,dp=2").phase == "prefill"
    assert read_workers('worker = ["http://a:1,phase=decode"]')[0].phase == "decode"
    assert read_workers('[[worker]]\nurl = "http://a:1"\nphase = "prefill"')[0].phase == "prefill"
    record = decode_record(encode_record(WorkerRecord(url="http://a:1", phase="prefill")))
    assert record.spec("x", "").phase == "prefill"
    added = OperatorMark(state="none", by="me", at=0.0, url="http://a:1", phase="decode").spec("x")
    assert added is not None
    assert added.phase == "decode"


def test_whoever_names_a_worker_says_how_it_hands_over() -> None:
    spec = worker_spec("http://a:1,phase=prefill,handover=sglang,bootstrap-port=9")
    record = encode_record(WorkerRecord(url="http://a:1", handover="sglang", bootstrap_port=9))
    mark = OperatorMark(state="none", by="me", at=0.0, url="http://a:1", handover="sglang", bootstrap_port=9)
    table = '[[worker]]\nurl = "http://a:1"\nhandover = "sglang"\nbootstrap-port = 9'
    for each in (spec, decode_record(record).spec("x", ""), mark.spec("x"), read_workers(table)[0]):
        assert each is not None
        assert (each.handover, each.bootstrap_port) == ("sglang", 9)
    assert (worker_spec("http://a:1").handover, worker_spec("http://a:1,handover=sglang").bootstrap_port) == (
        "vllm",
        8998,
    )
    for wrong in ("handover=tgi", "bootstrap-port=0", "bootstrap-port=x", "bootstrap-port=70000"):
        with pytest.raises(WorkerError):
            worker_spec(f"http://a:1,{wrong}")
    pair = worker_specs(["http://a:1,phase=prefill", "http://b:1,phase=decode,handover=sglang"])
    assert "phase=prefill,handover=sglang" in lacking_phase(pair)
    assert pair[0].is_another(worker_spec("http://a:1,phase=prefill,handover=sglang"))


def test_a_record_with_a_phase_that_nobody_knows_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="prefill, decode or both"):
        WorkerRecord(url="http://a:1", phase="draft").spec("x", "")


def test_a_worker_of_another_phase_is_another_worker() -> None:
    assert worker_spec("http://a:1,phase=decode").is_another(worker_spec("http://a:1"))
    assert not worker_spec("http://a:1,phase=decode").is_another(worker_spec("http://a:1,phase=decode"))


def test_a_fleet_of_one_phase_is_told_what_it_lacks() -> None:
    def lacking(*texts: str) -> str:
        return lacking_phase(worker_specs(texts))

    assert "phase=decode" in lacking("http://a:1,phase=prefill")
    assert "phase=prefill" in lacking("http://a:1,phase=decode", "http://b:1")
    assert not lacking("http://a:1,phase=decode", "http://b:1,phase=prefill")
    assert not lacking("http://a:1,phase=both", "http://b:1,phase=prefill")
    assert not lacking("http://a:1")
    assert not lacking()
    with pytest.raises(ValidationError, match="none that prefills; name one with phase=prefill"):
        Settings.flat(worker=("http://a:1,phase=decode",))
    Settings.flat(worker=("http://a:1,phase=decode",), workers_from=("dns://name:1?phase=prefill",))


@in_virtual_time
async def test_whoever_prefills_is_given_no_turn_and_nobody_else_prefills() -> None:
    fleet = fleet_of(p="prefill", q="prefill", d="decode", b="both")
    assert names(fleet.candidates()) == ["b", "d"]
    assert names(fleet.candidates(among=frozenset("pd"))) == ["d"]
    assert names(fleet.candidates(prefill=True)) == ["p", "q"]
    assert names(fleet.candidates(frozenset("p"), frozenset("pbd"), prefill=True)) == []
    assert (fleet.prefilling, fleet.has_other(frozenset("bd"))) == (2, False)
    assert fleet.has_other(frozenset("p"), prefill=True)
    fleet.remove("q")
    assert not fleet.has_other(frozenset("p"), prefill=True)
    fleet.put(worker("p", "both"))
    assert fleet.prefilling == 0
    assert names(fleet.candidates()) == ["b", "d", "p"]


@in_virtual_time
async def test_half_of_a_phase_is_not_taken_out_by_turns_however_many_the_other_has() -> None:
    fleet = fleet_of(p="prefill", q="prefill", a="decode", b="decode", c="decode", d="decode")
    for each in fleet:
        if not each.takes_turns:
            for _ in range(10):
                each.health.failed("status 500")
    assert sum(each.health.state.value == "suspect" for each in fleet) == 1


@in_virtual_time
async def test_what_only_those_serve_that_prefill_is_served_by_nobody() -> None:
    fleet = fleet_of(p="prefill", q="prefill", d="decode", b="both")
    async with catalog_of(Workers(p=["m", "o"], q=["m"], d=["m", "n"], b=["m"]), fleet=fleet) as catalog:
        assert (serving(catalog, "m"), serving(catalog, "n"), serving(catalog, "o")) == (None, {"d"}, set())
        assert set(catalog.partial) == {"n", "o"}
        assert (catalog.prefilling("m"), catalog.prefilling("n")) == (None, frozenset())
        assert catalog.prefilling("o") == frozenset("p")
        with pytest.raises(TurnError, match="more than prefill") as told:
            await learnt(catalog, "o")
        assert told.value.code == "no_worker"


@rows(
    "body",
    [
        b"", b"[]", b"null", b'"text"', b"{", b'{"prompt": ', b'{"prompt": "x"} more', b"\xff\xfe{\x00}\x00",
        b'{"prompt": "x", "\xed\xa0\xbd": 1}', b'{"prompt": "x", "\\ud83d": 1}', b"[" * 5000,
    ],
)  # fmt: skip
def test_what_cannot_be_read_goes_whole_for_the_worker_to_judge(body: bytes) -> None:
    assert split(body) is None


_BLOCKS = (
    b'{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"remote_engine_id":"e","remote_host":"h","remote_port":1}'
)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b'{"id":"x","kv_transfer_params":%b}' % _BLOCKS, ""),
        (b'{"kv_transfer_params":%b,"id":"x"} \n' % _BLOCKS, ""),
        (b'{"kv_transfer_params":null,"kv_transfer_params":%b}' % _BLOCKS, ""),
        (b'{"kv_transfer_params":%b,"kv_transfer_params":null}' % _BLOCKS, "missing"),
        (b'{"id":"x"}', "missing"),
        (b'{"inner":{"kv_transfer_params":%b}}' % _BLOCKS, "missing"),
        (b'{"text":"\\"kv_transfer_params\\":%b"}' % _BLOCKS.replace(b'"', b'\\"'), "missing"),
        (b'{"kv_transfer_params":%b' % _BLOCKS, "malformed"),
        (b'{"kv_transfer_params":{}}', "malformed"),
        (b'{"kv_transfer_params":%b}' % _BLOCKS.replace(b"[[1,2]]", b"[ ]"), "malformed"),
        (b'{"kv_transfer_params":%b}' % _BLOCKS.replace(b"true", b"false"), "malformed"),
        (b"", "malformed"),
    ],
    ids=range(12),
)
def test_a_hand_over_is_found_wherever_the_answer_says_it(answer: bytes, kind: str) -> None:
    if not kind:
        assert handover_in(answer) == _BLOCKS
        return
    with pytest.raises(NoHandover) as told:
        handover_in(answer)
    assert told.value.kind == kind


_OPENS = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
_SAYS = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"id":"x"}', b'{"id":"x"}'),
        (b"", b""),
        (_OPENS, b""),
        (_OPENS + b"\n", b""),
        (_OPENS + b"\n\n", b""),
        (_OPENS + b"\n\n" + _SAYS, _SAYS),
        (_OPENS + b"\r\n\r\n" + _SAYS, _SAYS),
        (_SAYS, _SAYS),
        (_SAYS + _OPENS + b"\n\n", _SAYS + _OPENS + b"\n\n"),
        (b"event: message_start\ndata: {}\n\n" + _SAYS, _SAYS),
        (b"event: error\ndata: {}\n\n", b"event: error\ndata: {}\n\n"),
        (b"data: " + b"x" * 9000, b"data: " + b"x" * 9000),
    ],
    ids=range(12),
)
def test_an_event_that_opens_a_stream_says_nothing_yet(text: bytes, said: bytes) -> None:
    assert spoken(text) == said


def test_half_a_character_in_a_text_is_passed_to_both_as_it_is() -> None:
    parts = split(b'{"prompt": "cut \\ud83d", "max_tokens": 9}')
    assert isinstance(parts, Parts)
    assert b'"cut \\ud83d"' in parts.prompt
    assert b'"max_tokens":1' in parts.prompt


_TEXT = b'"messages":["' + b"word " * 400 + b'"]'


@in_virtual_time
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","nvext":{"dp_rank":1},"metadata":{"session_id":"s"},%b}' % _TEXT,
        b'{%b,"model":"a","model":"m","metadata":{"session_id":"s"},"metadata":{"session_id":"t"}}' % _TEXT,
        b'{"model":5,"nvext":{"dp_rank":"no"},"metadata":{"session_id":"s"},%b}' % _TEXT,
        b'{"model":"m","metadata":["s"],"nvext":7,%b}' % _TEXT,
        b'{"model":"m","x":NaN,"metadata":{"session_id":"s"},%b}' % _TEXT,
        b'\xef\xbb\xbf{"model":"m","metadata":{"session_id":"s"},%b}' % _TEXT,
        b'{"model":"m","user":"\\ud83d","metadata":{"session_id":"s"},%b}' % _TEXT,
        b'{"model":"m","metadata":{"session_id":"s"},%b' % _TEXT,
        b"[" + _TEXT[11:] + b"]",
    ],
    ids=range(9),
)
async def test_a_long_body_that_is_read_by_its_members_says_what_it_says_to_any_turn(body: bytes) -> None:
    reading = Reading(identifier=Identifier(["metadata.session_id"]))
    found = []
    for kind in (Request, SplitRequest):
        exchange = SimpleNamespace(switches=b"", received_already=lambda least: (body, False))
        request = kind(reading, cast(Exchange, exchange))
        request.noted = {b"content-type": [b"application/json"]}
        assert request.read_body() is None
        fields = request.fields
        found.append((fields.model, fields.nvext, request.identity, request.misfits, request.unread, request.may_hint))
    assert found[0] == found[1]
    assert isinstance(request, SplitRequest)
    known, anew = (request.members is not None and split(body, said=request.members)), split(body)
    assert not known or known == anew


@in_virtual_time
@pytest.mark.parametrize("body", [b'{"stream":true}', b'{"bootstrap_room":5}', b'{"bootstrap_room":5,"stream":true}'])
async def test_of_a_request_of_which_nothing_is_left_a_whole_one_is_made(body: bytes) -> None:
    halves = split(body, "sglang")
    assert isinstance(halves, Halves)
    for each in halves.meeting(worker("p", "prefill").targets[0], 7):
        assert json.loads(each)["bootstrap_room"] == 7


class Answering:
    """A connection to a worker, the head of whose answer has come."""

    def __init__(self, status: int) -> None:
        self.response = SimpleNamespace(complete=False, status=status, headers=[], pieces=[])

    def relay(self, sink: Sink) -> None:
        for _ in range(9):
            sink.on_data(bytes(1 << 20), False)
        sink.on_data(b"end", True)

    def release(self) -> None:
        self.response.complete = True


@in_virtual_time
@pytest.mark.parametrize(("status", "failed"), [(200, False), (500, True)])
async def test_of_a_prompt_that_is_computed_meanwhile_only_an_error_is_read(status: int, failed: bool) -> None:
    loop, head, ended = asyncio.get_running_loop(), Wake(), list[Meeting]()
    attempt = Attempt(worker("p", "prefill").targets[0], loop, None)
    attempt.connection = cast("WorkerConnection", Answering(status))
    meeting = Meeting(attempt, None, loop, ended.append)
    meeting.begin(head)
    head.set()
    assert ended == [meeting]
    assert (meeting.failure is not None, meeting.body) == (failed, b"")


def test_an_error_as_sglang_says_it_is_told_in_openais_words() -> None:
    said = b'{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}'
    detail = {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    assert json.loads(worded(said)) == {"error": detail}
    for other in (b'{"error":{"message":"x"}}', b'{"detail":"x"}', b"<html>"):
        assert worded(other) == other
