"""The two readings of a body say the same, and the second one is bounded, whatever it is given."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.turn.fields import BodyHints, FieldReader, TooLarge, parse_aliases, with_model
from tests.support.rows import rows

PATHS = ("prompt_cache_key", "user", "metadata.session_id", "metadata.user_id")
reader = FieldReader(PATHS)

names = st.sampled_from(["model", "nvext", "user", "metadata", "session_id", "user_id", "dp_rank", "x", '"', "\\", ""])
leaves = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5) | st.just('\\"{[,: ')
values = st.recursive(
    leaves,
    # An object is a list of pairs: its names may be equal.
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(names, inner), max_size=4).map(tuple),
    max_leaves=12,
)
blanks = st.sampled_from(["", " ", "\n\t "])


def written(value: Any, blank: str, ascii_only: bool) -> str:
    """JSON, in which a tuple of pairs is an object."""
    if isinstance(value, tuple):
        pairs = (f"{json.dumps(name, ensure_ascii=ascii_only)}{blank}:{blank}" for name, _ in value)
        inner = (f"{pair}{written(each, blank, ascii_only)}" for pair, (_, each) in zip(pairs, value, strict=True))
        return "{" + blank + f"{blank},{blank}".join(inner) + blank + "}"
    if isinstance(value, list):
        return "[" + f"{blank},".join(written(each, blank, ascii_only) for each in value) + blank + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


def expected_ids(body: bytes) -> dict[str, str]:
    """As Python's `json`, which reads for most workers, has them."""
    said = json.loads(body)
    found = {}
    for path in PATHS:
        value = said
        for step in path.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        if isinstance(value, str):
            found[path] = value
    return found


@given(st.lists(st.tuples(names, values), max_size=6), blanks, st.booleans(), st.sampled_from(["utf-8", "utf-8-sig"]))
def test_it_finds_what_the_workers_reader_finds(
    pairs: list[tuple[str, Any]], blank: str, ascii_only: bool, encoding: str
) -> None:
    body = written(tuple(pairs), blank, ascii_only).encode(encoding)
    found = reader.find(body)
    assert found is not None
    assert found.ids == expected_ids(body)
    model = json.loads(body).get("model")
    assert found.fields.model == (model if isinstance(model, str) else None)
    try:
        fields = reader.decode_with_ids(body)
    except msgspec.DecodeError:
        return
    assert reader.ids(fields) == found.ids
    assert (fields.model, fields.nvext or BodyHints()) == (found.fields.model, found.fields.nvext or BodyHints())
    assert not found.misfits


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_every_encoding_that_json_has(encoding: str) -> None:
    found = reader.find('{"x": NaN, "model": "m", "user": "Zoë\ud83d"}'.encode(encoding, "surrogatepass"))
    assert found is not None
    assert (found.fields.model, found.ids) == ("m", {"user": "Zoë\ud83d"})


@pytest.mark.parametrize("reading", ["decode_with_ids", "find"])
@pytest.mark.parametrize(
    ("body", "ids"),
    [
        (b'{"user": "a", "user": "b"}', {"user": "b"}),
        (b'{"user": "a", "us\\u0065r": "b"}', {"user": "b"}),
        (b'{"user": "a", "user": null}', {}),
        (b'{"metadata": {"session_id": "a"}, "metadata": {}}', {}),
        (b'{"metadata": {"session_id": "a", "session_id": "b"}}', {"metadata.session_id": "b"}),
        (b'{"x": {"user": "a"}, "y": ["user", {"user": "b"}]}', {}),
        (b'{"x": "\\"user\\": \\\\", "user": "c"}', {"user": "c"}),
    ],
)
def test_of_equal_names_the_last_one_counts_in_both_readings(reading: str, body: bytes, ids: dict[str, str]) -> None:
    """A body that goes another way through this must not be another session's."""
    assert ids == expected_ids(body)
    if reading == "find":
        found = reader.find(body)
        assert found is not None
        assert found.ids == ids
    else:
        assert reader.ids(reader.decode_with_ids(body)) == ids


@rows("body", [b"", b"{", b"[]", b"null", b'"{}"', b'{"user": "a"', b'{"user": "a', b"7", b"\xff\xfe{"])
def test_what_is_no_whole_object_has_no_fields(body: bytes) -> None:
    assert reader.find(body) is None


def test_hints_of_another_type_are_passed_over() -> None:
    def hints(nvext: str) -> tuple[BodyHints | None, int]:
        found = reader.find(b'{"nvext": %b}' % nvext.encode())
        assert found is not None
        return found.fields.nvext, found.misfits

    assert hints('{"dp_rank": "1", "backend_instance_id": 7}') == (BodyHints(backend_instance_id=7), 1)
    assert hints('{"dp_rank": 1.5, "prefill_dp_rank": [], "decode_worker_id": {}}') == (BodyHints(), 3)
    assert hints('{"dp_rank": true, "backend_instance_id": "w"}') == (BodyHints(backend_instance_id="w"), 1)
    assert hints('{"other": [1], "dp_rank": null}') == (BodyHints(), 0)
    assert hints("[]") == (None, 1)
    assert hints("null") == (None, 0)


HUGE = {
    "brackets": lambda: b'{"x":' + b"[" * 30_000_000,
    "strings": lambda: b'{"x":[' + b'"",' * 10_000_000,
    "escaped quotes": lambda: b'{"x":"' + b'\\"' * 10_000_000,
    "backslashes": lambda: b'{"x":"' + b"\\" * 30_000_000 + b'"}',
    "numbers": lambda: b'{"x":[' + b"1," * 10_000_000 + b"1]}",
    "blanks": lambda: b'{"x":' + b" " * 30_000_000 + b"1}",
    "UTF-16": lambda: ('{"x":"' + "a" * 1_000_000 + '"}').encode("utf-16"),
    "names": lambda: b"{" + b'"user":"a",' * 3_000_000,
}
"""Made by the test that reads them: every test process imports this, and would hold all of them until it ends."""


@rows("made", HUGE.values())
def test_the_second_reading_is_bounded(made: Callable[[], bytes]) -> None:
    body = made()
    began = time.process_time()
    with pytest.raises(TooLarge):
        reader.find(body)
    assert time.process_time() - began < 1.5  # without a bound: many seconds


def test_a_large_picture_costs_nothing() -> None:
    began = time.process_time()
    found = reader.find(b'{"x":"' + b"A" * 60_000_000 + b'", "y": NaN, "user": "u"}')
    assert found is not None
    assert found.ids == {"user": "u"}
    assert time.process_time() - began < 1.5


def test_nesting_has_no_bound_of_its_own() -> None:
    found = reader.find(b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b', "user": "u"}')
    assert found is not None
    assert found.ids == {"user": "u"}


# -- aliases

ALIAS, MODEL = "small", 'qwen"3-8b/é😀'


@given(
    before=st.lists(st.tuples(names, values), max_size=4),
    after=st.lists(st.tuples(names.filter(lambda name: name != "model"), values), max_size=4),
    blank=blanks,
    around=blanks,
    name=st.sampled_from(['"model"', '"mod\\u0065l"']),
    said=st.sampled_from(['"small"', '"sm\\u0061ll"', '"\\u0073\\u006D\\u0061\\u006C\\u006c"']),
    encoding=st.sampled_from(
        ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
    ),
    ascii_only=st.booleans(),
)
def test_an_alias_is_replaced_and_every_other_byte_stays(
    before: list[Any],
    after: list[Any],
    blank: str,
    around: str,
    name: str,
    said: str,
    encoding: str,
    ascii_only: bool,
) -> None:
    """The token of the last `model` of the outermost object: whatever stands around it, in whatever encoding."""
    first, last = (written(tuple(each), blank, ascii_only)[1:-1] for each in (before, after))
    head = "{" + first + (blank + "," if before else "") + f"{name}{blank}:{blank}"
    tail = (f"{blank}," if after else "") + last + "}" + around
    # What only half of a pair of surrogates is, UTF-8 and the others write only by force.
    body, expected = (
        (around + head + token + tail).encode(encoding, "surrogatepass") for token in (said, json.dumps(MODEL))
    )
    found = reader.find(body)
    assert found is not None
    assert found.fields.model == ALIAS
    assert with_model(body, ALIAS, MODEL) == expected


@rows(
    ("body", "expected"),
    [
        (b'{"model":"small"}', b'{"model":"m"}'),
        (b'{"model":"big","model":"small"}', b'{"model":"big","model":"m"}'),
        (b'{"model":"small","model":"small"}', b'{"model":"small","model":"m"}'),
        (b'{"x":{"model":"small"},"model" : "small" }\n', b'{"x":{"model":"small"},"model" : "m" }\n'),
        (b'{"model":"small","x":[{"model":"small"}]}', b'{"model":"m","x":[{"model":"small"}]}'),
        (b'{"x":"\\"model\\":\\"small\\"","model":"small"}', b'{"x":"\\"model\\":\\"small\\"","model":"m"}'),
        (b'{"model":"small"' + b" " * 9000 + b"}", b'{"model":"m"' + b" " * 9000 + b"}"),
        (b'{"temperature":NaN,"model":"small",}', b'{"temperature":NaN,"model":"m",}'),
    ],
)
def test_which_place_is_the_models(body: bytes, expected: bytes) -> None:
    assert with_model(body, ALIAS, "m") == expected


@pytest.mark.parametrize(
    "body", [b'{"model":"big"}', b'{"x":{"model":"small"}}', b'["model","small"]', b"", b'{"model":7}']
)
def test_what_is_not_said_there_is_not_replaced(body: bytes) -> None:
    assert with_model(body, ALIAS, "m") is None


def test_replacing_is_bounded() -> None:
    with pytest.raises(TooLarge):
        with_model(b'{"x":[' + b"[]," * 100_000 + b'[]],"model":"small"}', ALIAS, "m")


@pytest.mark.parametrize(
    ("texts", "wrong"),
    [
        (["small"], "write ALIAS=MODEL"),
        (["=m"], "write ALIAS=MODEL"),
        (["small="], "write ALIAS=MODEL"),
        (["a=m", "a=n"], "given as an alias of"),
        (["a=b", "b=c"], "is an alias itself"),
        (["a=a"], "is an alias itself"),
    ],
)
def test_aliases_that_mean_nothing_are_refused(texts: list[str], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        parse_aliases(texts)
    assert parse_aliases(["s=a=b", "t=a=b"]) == {"s": "a=b", "t": "a=b"}
