"""Which session a turn belongs to, and under which key it is claimed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import TurnError
from app.http.headers import Noted
from app.sessions.identity import (
    DEFAULT_SOURCES,
    FINAL,
    HINTS,
    MAX_ID_BYTES,
    PREFILL_HINTS,
    RANK_HINT,
    WORKER_HINT,
    Hints,
    Identifier,
    Identity,
    KeyHasher,
    parse_source,
    read_hints,
)
from tests.support.rows import rows

PARSED = [source for text in DEFAULT_SOURCES for source in parse_source(text)]
SOURCES = [source.session for source in PARSED if source.session]
PARENTS = list(dict.fromkeys(source.parent for source in PARSED if source.parent))
identifier = Identifier()
identify = identifier.identify


def of(name: bytes, *values: bytes) -> Noted:
    return {name: list(values)}


def refused(headers: Noted) -> tuple[str, str | None]:
    with pytest.raises(TurnError) as caught:
        (identify(headers), read_hints(headers))
    return caught.value.code, caught.value.param


def test_nothing_said() -> None:
    assert identify({}) == Identity()
    assert read_hints({}) == Hints()


def test_the_names_of_sources_stand_for_their_headers() -> None:
    """In any case; a header of such a name, and a misspelt name, are told apart by `header:`."""
    assert {source.session for source in parse_source("Codex")} >= {b"thread-id", b"thread_id", b"session_id"}
    assert parse_source("header:X-Chat/X-Above") == parse_source("x-chat/x-above")
    assert parse_source("header:codex")[0].session == b"codex"
    assert parse_source("header:a+b/+c") == parse_source("a+b/+c")
    for misspelt in ("opencod", "Claude_Code", "dynamos"):
        with pytest.raises(ValueError, match="did you mean"):
            parse_source(misspelt)
    assert Identifier(("header:a", "a")).wanted == {b"a", FINAL}


def test_headers_that_are_known_and_not_read() -> None:
    assert identifier.unread
    assert not identifier.unread & identifier.wanted
    assert Identifier(("dynamo",)).unread >= {b"session_id", b"x-session-affinity", b"x-claude-code-session-id"}


@rows("source", SOURCES)
def test_each_source_of_a_session(source: bytes) -> None:
    assert identify(of(source, b"abc")).session == (b"abc",)


@pytest.mark.parametrize("parent", PARENTS)
@pytest.mark.parametrize("source", SOURCES)
def test_each_source_of_a_parent_whatever_names_the_session(source: bytes, parent: bytes) -> None:
    assert identify({source: [b"abc"], parent: [b"above"]}) == Identity((b"abc",), (b"above",))
    assert identify({source: [b"abc"], parent: [b"abc"]}) == Identity((b"abc",))  # of itself
    assert identify(of(parent, b"above")) == Identity()


def test_child_agents_of_claude_code() -> None:
    run, agent, above = (b"x-claude-code-" + name for name in (b"session-id", b"agent-id", b"parent-agent-id"))
    assert identify({run: [b"r"]}) == Identity((b"r",))
    assert identify({run: [b"r"], agent: [b"a"]}) == Identity((b"r", b"a"), (b"r",))
    assert identify({run: [b"r"], agent: [b"a"], above: [b"b"]}) == Identity((b"r", b"a"), (b"r", b"b"))
    assert identify({run: [b"r"], above: [b"b"]}) == Identity((b"r",))
    assert identify({agent: [b"a"], above: [b"b"]}) == Identity()


def test_one_agent_is_never_another_ones_session() -> None:
    hasher = KeyHasher()
    assert (
        len({hasher.key(b"", b"ab"), hasher.key(b"", b"a", b"b"), hasher.key(b"a", b"b"), hasher.key(b"", b"", b"ab")})
        == 4
    )


def test_sources_are_asked_in_order() -> None:
    headers: Noted = {source: [b"s%d" % number] for number, source in enumerate(SOURCES)}
    for number, source in enumerate(SOURCES):
        assert identify(headers).session == (b"s%d" % number,)
        headers[source] = [b"  "]  # empty: says nothing, and the next one is asked
    assert identify(headers).session is None


def test_a_request_id_is_no_session_id() -> None:
    assert b"x-request-id" not in identifier.wanted
    assert identify(of(b"x-request-id", b"abc")).session is None


@rows(
    ("value", "session"),
    [
        (b"a", b"a"),
        (b"  a\t", b"a"),
        (b"", None),
        (b" \t ", None),
        (b"!~", b"!~"),
        (b"x" * MAX_ID_BYTES, b"x" * MAX_ID_BYTES),
        (b" " + b"x" * MAX_ID_BYTES + b" ", b"x" * MAX_ID_BYTES),
        (b"0", b"0"),
        (b"nullable", b"nullable"),
    ],
)
def test_ids_that_are_taken(value: bytes, session: bytes | None) -> None:
    assert identify(of(b"session-id", value)).session == (None if session is None else (session,))


@pytest.mark.parametrize(
    "value", [b"a b", b"a\tb", b"\x00", b"a\x7f", b"\xc3\xa4", b"\x80", b"x" * (MAX_ID_BYTES + 1), b"\xff" * 300]
)
@pytest.mark.parametrize("source", [b"session-id", b"x-parent-session-id"])
def test_ids_that_are_refused(value: bytes, source: bytes) -> None:
    assert refused({b"session-id": [b"fine"]} | of(source, value)) == ("invalid_session_id", source.decode())


@given(st.binary(max_size=300))
def test_any_id_is_taken_whole_or_refused_or_none(value: bytes) -> None:
    trimmed = value.strip()
    try:
        said = identify(of(b"session-id", value))
    except TurnError:
        assert refused(of(b"session-id", value))[0] == "invalid_session_id"
        assert len(trimmed) > MAX_ID_BYTES or not all(0x21 <= byte <= 0x7E for byte in trimmed)
    else:
        assert said.session == ((trimmed,) if trimmed and not said.ignored else None)


@pytest.mark.parametrize(
    ("values", "session"), [([b"a", b"a"], b"a"), ([b"a", b" a "], b"a"), ([b"", b"a"], b"a"), ([b"", b" "], None)]
)
def test_repeated_ids_that_agree(values: list[bytes], session: bytes | None) -> None:
    assert identify(of(b"x-dynamo-session-id", *values)).session == (None if session is None else (session,))


def test_two_differing_ids_are_refused() -> None:
    assert refused(of(b"x-dynamo-session-id", b"a", b"b"))[0] == "invalid_session_id"
    assert refused(of(b"x-dynamo-session-id", b"a", b"A"))[0] == "invalid_session_id"


@rows(
    ("values", "final", "unclear"),
    [
        ([b"true"], True, False),
        ([b"TRUE"], True, False),
        ([b" True "], True, False),
        ([b"1"], True, False),
        ([b"yes"], True, False),
        ([b"on"], True, False),
        ([b"true", b"1", b""], True, False),
        ([b"false"], False, False),
        ([b"0"], False, False),
        ([b"no"], False, False),
        ([b"Off"], False, False),
        ([b""], False, False),
        ([b"truely"], False, True),
        ([b"2"], False, True),
        ([b"true, true"], False, True),
        # Whoever joins such headers to one makes a word of them that says nothing: it must mean the same apart.
        ([b"false", b"true"], False, True),
    ],
)
def test_final(values: list[bytes], final: bool, unclear: bool) -> None:
    said = identify(of(FINAL, *values))
    assert (said.final, said.final_unclear) == (final, unclear)


@pytest.mark.parametrize(
    ("value", "rank"), [(b"0", 0), (b" 7 ", 7), (b"999999", 999999), (b"007", 7), (b"", None), (b"  ", None)]
)
def test_ranks_that_are_taken(value: bytes, rank: int | None) -> None:
    assert read_hints(of(RANK_HINT, value)) == Hints(rank=rank)  # 0 is a rank


@rows("value", [b"-1", b"+1", b"1.0", b"1e3", b"x", b"1 2", b"1000000", b"\xb2"])
def test_ranks_that_are_refused(value: bytes) -> None:
    assert refused(of(RANK_HINT, value)) == ("invalid_hint", "X-Dynamo-DP-Rank")


def test_worker_hint() -> None:
    assert read_hints(of(WORKER_HINT, b" w-1 ")).worker == "w-1"
    assert read_hints(of(WORKER_HINT, b" ")).worker is None
    assert read_hints(of(WORKER_HINT, b"\xff")).worker == "\xff"  # names nobody; must not fail
    assert refused(of(WORKER_HINT, b"a", b"b"))[0] == "invalid_hint"


@pytest.mark.parametrize("name", PREFILL_HINTS)
def test_prefill_hints_are_seen(name: bytes) -> None:
    assert read_hints(of(name, b"x")) == Hints(prefill=True)
    assert {WORKER_HINT, RANK_HINT, name} <= HINTS


@rows(
    "text",
    [
        "",
        "a b",
        "a/",
        "/a",
        "a+",
        "a:b",
        "body:",
        "body:messages",
        "x-request-id",
        "Traceparent",
        "a/x-request-id",
        "é",
    ],
)
def test_sources_that_are_refused(text: str) -> None:
    if text in ("a/", "a+"):  # nothing is said after it
        assert parse_source(text)[0].headers == {b"a"}
        return
    with pytest.raises(ValueError):
        parse_source(text)


# -- keys

fields = st.binary(max_size=40)


def test_key_is_forty_hex_digits_and_the_same_everywhere() -> None:
    # A fixed value: replicas of different versions must agree.
    assert KeyHasher().key(b"", b"s1") == KeyHasher().key(b"", b"s1")
    key = KeyHasher().key(b"tenant", b"session")
    assert len(key) == 40
    assert set(key) <= set("0123456789abcdef")
    assert key == "34b06182d3c6f25a16fd01517973b04802635185"


@given(fields, fields, fields, fields)
def test_no_two_pairs_collide(tenant: bytes, session: bytes, other_tenant: bytes, other_session: bytes) -> None:
    hasher = KeyHasher()
    same = (tenant, session) == (other_tenant, other_session)
    assert (hasher.key(tenant, session) == hasher.key(other_tenant, other_session)) is same


@given(st.binary(max_size=20), st.integers(0, 20))
def test_no_split_of_one_text_collides(text: bytes, at: int) -> None:
    """What a separator between tenant and id would get wrong, wherever it is put and whatever is in the fields."""
    hasher = KeyHasher()
    at = min(at, len(text))
    keys = {hasher.key(text[:cut], text[cut:]) for cut in range(len(text) + 1)}
    assert len(keys) == len(text) + 1
    for separator in (b":", b"/", b"\x00", b"%d:" % len(text)):
        assert hasher.key(text[:at] + separator, text[at:]) != hasher.key(text[:at], separator + text[at:])


def test_secret_changes_every_key() -> None:
    assert KeyHasher(b"a").key(b"", b"s") != KeyHasher().key(b"", b"s") != KeyHasher(b"b").key(b"", b"s")
    assert KeyHasher(b"a" * 64).key(b"", b"s")
    with pytest.raises(ValueError):
        KeyHasher(b"a" * 65)


def test_hasher_keeps_no_state_between_keys() -> None:
    hasher = KeyHasher()
    first = hasher.key(b"", b"a")
    hasher.key(b"", b"b")
    assert hasher.key(b"", b"a") == first
