"""The end marker wherever the stream is split, and an error event that is never glued to what was cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.sse import DoneDetector, error_event


def first_hit(pieces: list[bytes]) -> int | None:
    """How many bytes had been fed when the marker was reported."""
    detector, fed = DoneDetector(), 0
    for piece in pieces:
        fed += len(piece)
        if detector.feed(piece):
            return fed
    return None


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(stream) + 1) for place in places}), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    "stream",
    [
        b"data: [DONE]",
        b"data:[DONE]",
        b"data: [DONE]\n\n",
        b"data: a\n\ndata: [DONE]\n\n",
        b"data: a\r\n\r\ndata: [DONE]\r\n\r\n",
        b"data: a\r\rdata:[DONE]\r\r",
        b"data: data: [DONE]\ndata: [DONE]\n",
    ],
)
def test_marker_is_found_at_every_split(stream: bytes) -> None:
    end = stream.rindex(b"[DONE]") + 6
    for at in range(len(stream) + 1):
        hit = first_hit([stream[:at], stream[at:]])
        assert hit is not None
        assert hit >= end
        assert hit == (len(stream) if at < end else at)
    assert first_hit([bytes([byte]) for byte in stream]) == end


@pytest.mark.parametrize(
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
    ],
)
def test_what_only_looks_like_the_marker(stream: bytes) -> None:
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


BODY = b'{"error":{}}'


@pytest.mark.parametrize("sent", [b"", b"data: a\n\n", b"data: a\r\n\r\n", b"data: a\r\r", b"\n\n"])
def test_error_event_at_a_boundary(sent: bytes) -> None:
    assert error_event(BODY, sent) == b"data: " + BODY + b"\n\n"


@pytest.mark.parametrize("sent", [b"data: a", b"data: a\n", b"data: a\r\n", b"da", b"id: 1\n"])
def test_error_event_ends_what_was_cut(sent: bytes) -> None:
    event = error_event(BODY, sent)
    assert event.endswith(b"data: " + BODY + b"\n\n")
    whole = (sent + event).replace(b"\r\n", b"\n")
    assert whole.split(b"\n\n")[-2] == b"data: " + BODY
    assert b"\n\n\n" not in whole  # an empty event would crash openai-python
