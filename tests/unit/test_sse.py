"""A stream's last event, wherever the stream is split, and where a stream stands."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.sse import EndDetector, Trail
from tests.support.rows import rows


def first_hit(pieces: list[bytes]) -> int | None:
    """How many bytes had been fed when the marker was reported."""
    detector, fed = EndDetector(), 0
    for piece in pieces:
        fed += len(piece)
        if detector.feed(piece):
            return fed
    return None


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(stream) + 1) for place in places}), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


@rows(
    "stream",
    [
        b"data: [DONE]",
        b"data:[DONE]",
        b"data: [DONE]\n\n",
        b"data: a\n\ndata: [DONE]\n\n",
        b"data: a\r\n\r\ndata: [DONE]\r\n\r\n",
        b"data: a\r\rdata:[DONE]\r\r",
        b"data: data: [DONE]\ndata: [DONE]\n",
        b"event: message_stop\ndata: {}\n\n",
        b"event:response.incomplete\r\n",
        b'data: {"type": "response.failed", "response": {}}\n\n',
        b'data: {"response": {"status":"completed"}, "type" : "response.completed"}\n\n',
    ],
)
def test_last_event_is_found_at_every_split(stream: bytes) -> None:
    marks = (b"[DONE]", b"message_stop", b"response.incomplete", b'"response.failed"', b'"response.completed"')
    end = max(stream.rfind(mark) + len(mark) for mark in marks if mark in stream)
    for at in range(len(stream) + 1):
        hit = first_hit([stream[:at], stream[at:]])
        assert hit is not None
        assert hit >= end
        assert hit == (len(stream) if at < end else at)
    assert first_hit([bytes([byte]) for byte in stream]) == end


@rows(
    "stream",
    [
        b"",
        b"data: [DONE",
        b"data: x[DONE]\n",
        b"data:  [DONE]\n",
        b"xdata: [DONE]\n",
        b" data: [DONE]\n",
        b'data: {"text":"data: [DONE]"}\n\n',
        b": data: [DONE]\n",
        b"data: a data:[DONE]\n",
        b"event: message_start\nevent: response.output_item.done\nevent: response.mcp_call.completed\n",
        b'data: {"text":"\\"type\\":\\"message_stop\\""}\n\n',
        b": event: message_stop\n",
    ],
)
def test_what_only_looks_like_it(stream: bytes) -> None:
    assert first_hit([stream]) is None
    assert first_hit([bytes([byte]) for byte in stream]) is None


tokens = st.sampled_from(
    [b"data: [DONE]", b"data:[DONE]", b"data: ", b"[DONE]", b"data", b"\n", b"\r\n", b"\r", b"x", b"[", b"D"]
)


@given(st.lists(tokens, max_size=12).map(b"".join), st.lists(st.integers(0, 200), max_size=8))
def test_no_split_changes_what_is_found(stream: bytes, places: list[int]) -> None:
    whole = first_hit([bytes([byte]) for byte in stream])
    pieces = cut(stream, places)
    hit = first_hit(pieces)
    assert (hit is None) is (whole is None)
    if whole is not None:
        # In the piece that has the marker's last byte.
        ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
        assert hit == next(end for end in ends if end >= whole)


def trail_of(pieces: list[bytes], as_chunks: bool) -> Trail:
    trail = Trail()
    for piece in pieces:
        if as_chunks and piece:
            trail.append(b"%x\r\n%b\r\n" % (len(piece), piece))
        else:
            trail.note(piece)
    return trail


@pytest.mark.parametrize("as_chunks", [False, True])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\r", b"\r\n\r\n"])
def test_where_a_stream_stands(end: bytes, as_chunks: bool) -> None:
    event = b"event: m" + end[: len(end) // 2] + b"data: a" + end
    for at in range(len(event) + 1):
        pieces = [event, event[:at], event[at:]]
        assert trail_of(pieces, as_chunks).between_events
        assert trail_of(pieces[:2], as_chunks).between_events is (at in (0, len(event)))


@pytest.mark.parametrize("large", [10, 900, 5000])
@pytest.mark.parametrize("size", [100, 1024, 1025, 4000, 100_000])
def test_large_last_event(size: int, large: int) -> None:
    before = b'event: response.created\ndata: {"type":"response.created"}\n\n' * 30
    last = b'event: response.completed\ndata: {"text":"%b"}\n\n' % (b"a" * large)
    wire = before + last
    pieces = [wire[at : at + size] for at in range(0, len(wire), size)]
    assert trail_of(pieces, False).over or size * 8 < large
    assert not trail_of([*pieces[:-1], pieces[-1][:-1]], False).over


def test_trail_keeps_little() -> None:
    trail = Trail()
    for _ in range(100):
        trail.note(b"a" * 250_000)
    assert sum(len(kept) if isinstance(kept, bytes) else len(kept[0]) for kept in trail) < 10_000
