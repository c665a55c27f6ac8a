"""Which session a turn belongs to, read from its headers and, where asked for, its body. Pure.

The first source that carries an id decides. A request id is never taken for a session id: it would send every turn to
a new place.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping

import msgspec

from app.errors import TurnError
from app.http.headers import Noted
from app.metrics import NoId

MAX_ID_BYTES = 256
_HASHED = b"\xff"
"""Begins an id that is a hash: neither a header's id nor a text in UTF-8 has this byte."""

Session = tuple[bytes, ...]
"""A session's id; for a child agent that shares its client's session id, that id and the agent's."""

BODY_FIELDS = ("prompt_cache_key", "user", "metadata.session_id", "metadata.user_id")
"""Fields of requests that some clients fill with a session's id. Read only where a source names them."""

_NAMED = {
    "dynamo": ("x-dynamo-session-id/x-dynamo-parent-session-id",),
    # One session id for all agents of a run; child agents say their own and their parent's. Before it had the headers,
    # the id stood in the body.
    "claude-code": (
        "x-claude-code-session-id+x-claude-code-agent-id/+x-claude-code-parent-agent-id",
        "body:metadata.user_id",
    ),
    # Each as it is and as it was: before it had threads, and with underscores.
    "codex": (
        "thread-id/x-codex-parent-thread-id",
        "thread_id/x-codex-parent-thread-id",
        "session-id/x-codex-parent-thread-id",
        "session_id/x-codex-parent-thread-id",
        "conversation-id/x-codex-parent-thread-id",
        "conversation_id/x-codex-parent-thread-id",
    ),
    "opencode": ("x-session-id/x-parent-session-id", "x-session-affinity/x-parent-session-id"),
}
DEFAULT_SOURCES = tuple(_NAMED)

_OTHER_HEADERS = frozenset(
    {
        b"x-conversation-id",
        b"x-chat-id",
        b"x-thread-id",
        b"x-openwebui-chat-id",  # Open WebUI
        b"x-litellm-session-id",  # LiteLLM
        b"x-session-token",  # llm-d
        b"x-smg-routing-key",  # SGLang's gateway
        b"x-grok-conv-id",  # xAI
        b"helicone-session-id",
    }
)
"""Headers that name a session for somebody, and for us only where `session-from` lists them."""

FINAL = b"x-dynamo-session-final"
WORKER_HINT = b"x-dynamo-worker-instance-id"
RANK_HINT = b"x-dynamo-dp-rank"
# Dynamo's hints for a separate prefill stage: where no worker prefills for others they are counted, without effect.
PREFILL_HINTS = (b"x-dynamo-prefill-instance-id", b"x-dynamo-prefill-dp-rank")
HINTS = frozenset({WORKER_HINT, RANK_HINT, *PREFILL_HINTS})

_TRUE = frozenset({b"1", b"true", b"yes", b"on"})
_FALSE = frozenset({b"0", b"false", b"no", b"off"})
# Visible ASCII only: an id is an opaque token, and anything else differs between encodings on its way here.
_is_id = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_ID_BYTES).fullmatch
# What stands where something else was to be put: {{ID}}, ${ID}, $(uuidgen) anywhere; {id}, <your id>, %ID%, $ID, %s
# alone.
_has_template = re.compile(
    rb"\{\{.*\}\}|\$\{.*\}|\$\(.*\)|^(?:\{[A-Za-z_]*\}|<[A-Za-z][\w -]*>|%[A-Za-z_]+%|\$[A-Z_]+|%s)$", re.DOTALL
).search
_NOTHING = frozenset(
    {b"null", b"undefined", b"none", b"nil", b"nan", b"(null)", b"[object object]", b'""', b"''"}
    | {b"00000000-0000-0000-0000-000000000000", b"0" * 32}
)
"""What programs write, in lower case, where they have no id; of a UUID RFC 9562 5.9."""
_is_name = re.compile(r"[a-z0-9!#$%&'*.^_`|~-]+").fullmatch


class Source(msgspec.Struct, frozen=True):
    """Where one kind of client says its session's id. Header names are lower-case."""

    session: bytes = b""
    agent: bytes | None = None
    """Names a child agent within the session."""
    parent: bytes | None = None
    """Names the parent's session."""
    parent_agent: bytes | None = None
    """Names the parent agent within the same session."""
    body: str = ""
    """One of BODY_FIELDS, for a source that is not a header."""
    only_claude_codes: bool = False
    """The field counts only where Claude Code has written it."""

    @property
    def headers(self) -> frozenset[bytes]:
        names = (self.session, self.agent, self.parent, self.parent_agent)
        return frozenset(name for name in names if name)


def parse_source(text: str) -> tuple[Source, ...]:
    """What a word of the setting stands for: a name of `_NAMED`; `header:NAME`, in full
    `[header:]HEADER[+AGENT_HEADER][/PARENT_HEADER | /+PARENT_AGENT_HEADER]`; or `body:FIELD` with FIELD one of
    BODY_FIELDS. Raises ValueError with the remedy."""
    named = _NAMED.get(text.lower())
    if named is not None:
        return tuple(_parse(each, only_claude_codes=True) for each in named)
    if text.isalpha() or text.lower().replace("_", "-") in _NAMED:
        meant = difflib.get_close_matches(text.lower().replace("_", "-"), _NAMED, 1, 0.75)
        if meant:
            raise ValueError(f"{text!r} is no session source; did you mean {meant[0]}? (or header:{text})")
    return (_parse(text),)


def _parse(text: str, *, only_claude_codes: bool = False) -> Source:
    if text.startswith("body:"):
        field = text.removeprefix("body:")
        if field not in BODY_FIELDS:
            raise ValueError(f"{text!r} is no session source; the body's fields are {', '.join(BODY_FIELDS)}")
        return Source(body=field, only_claude_codes=only_claude_codes)
    own, _, parent = text.lower().removeprefix("header:").partition("/")
    session, _, agent = own.partition("+")
    for name in (session, *filter(None, (agent, parent.removeprefix("+")))):
        if not _is_name(name):
            names = ", ".join(_NAMED)
            raise ValueError(f"{text!r} is no session source; write {names}, header:NAME or body:FIELD")
        if name in ("x-request-id", "request-id", "x-client-request-id", "traceparent", "x-correlation-id"):
            raise ValueError(f"{text!r}: {name} differs from turn to turn; it cannot name a session")
    return Source(
        session=session.encode(),
        agent=agent.encode() or None,
        parent=None if parent.startswith("+") else parent.encode() or None,
        parent_agent=parent[1:].encode() if parent.startswith("+") else None,
    )


class Identity(msgspec.Struct, frozen=True):
    """What a turn says about its session."""

    session: Session | None = None
    parent: Session | None = None
    final: bool = False
    final_unclear: bool = False
    """The final header was there and said neither yes nor no; it counts as no."""
    ignored: tuple[NoId, ...] = ()
    """For each id that is none, why."""


class Hints(msgspec.Struct, frozen=True):
    """Where the headers of a turn would have it placed."""

    worker: str | None = None
    rank: int | None = None
    prefill: bool = False
    """There were hints for a prefill stage."""


class Identifier:
    """Reads identities from the sources that the settings name, in their order."""

    def __init__(self, sources: Iterable[str] = DEFAULT_SOURCES) -> None:
        """Raises ValueError as `parse_source`."""
        parsed = [source for text in sources for source in parse_source(text)]
        headers = [source for source in parsed if source.session]
        self._bodies = [source for source in parsed if source.body]
        self.body_fields = tuple(dict.fromkeys(source.body for source in self._bodies))
        """Those of BODY_FIELDS that `identify` wants to know when no header names a session."""
        self.reads_body = bool(self._bodies)
        all_parents = [source.parent for source in headers if source.parent]
        # A client may say its parent in the words of another source than its own id.
        self._headers = [
            (source, source.session, tuple(dict.fromkeys(filter(None, (source.parent, *all_parents)))))
            for source in headers
        ]
        self.wanted = frozenset({FINAL}).union(*(source.headers for source in headers))
        """Every header that `identify` reads."""
        known = {source.session for name in _NAMED for source in parse_source(name)} - {b""}
        self.unread = (known | _OTHER_HEADERS) - self.wanted
        """Headers that are known to carry a session, and are not read."""
        self._first = self._headers[0][1] if self._headers else b""
        self._besides = self.wanted - {self._first}
        self._why_none = functools.lru_cache(maxsize=2048)(_why_none)
        self._of_first = functools.lru_cache(maxsize=2048)(self._identity_of_first)

    def identify(self, noted: Noted, body: Mapping[str, str] | None = None) -> Identity:
        """`noted` holds the values of `wanted`; `body` the texts that a JSON body has in `body_fields`.
        Raises TurnError `invalid_session_id`."""
        first = noted.get(self._first)
        if first is not None and len(first) == 1 and self._besides.isdisjoint(noted):
            # As nearly all turns of a session say it.
            identity = self._of_first(first[0])
            if identity.session is not None or not body:
                return identity
        ignored: list[NoId] = []
        session, parent = self._of_headers(noted, ignored)
        if session is None and body:
            session = self._of_body(body, ignored)
        final, unclear = _final(noted[FINAL]) if FINAL in noted else (False, False)
        return Identity(session, parent, final, unclear, tuple(ignored))

    def _identity_of_first(self, value: bytes) -> Identity:
        ignored: list[NoId] = []
        session, parent = self._of_headers({self._first: [value]}, ignored)
        return Identity(session, parent, ignored=tuple(ignored))

    def _of_headers(self, noted: Noted, ignored: list[NoId]) -> tuple[Session | None, Session | None]:
        for source, name, parents in self._headers:
            if name in noted and (own := self._id(noted, name, ignored)):
                session: Session = (own,)
                parent: Session | None = None
                if source.agent is not None and (agent := self._id(noted, source.agent, ignored)):
                    session, parent = (own, agent), (own,)
                    if source.parent_agent is not None and (above := self._id(noted, source.parent_agent, ignored)):
                        parent = (own, above)
                for name in parents:
                    if name in noted and (above := self._id(noted, name, ignored)):
                        parent = (above,)
                        break
                return session, None if parent == session else parent
        return None, None

    def _id(self, noted: Noted, name: bytes, ignored: list[NoId]) -> bytes | None:
        """The id that a header has; why it is none, if it is none, goes to `ignored`."""
        values = noted.get(name)
        if values is None:
            return None
        if len(values) == 1:
            value: bytes | None = values[0].strip()
        else:
            kept = [each for each in values if self._why_none(each.strip()) is None]
            value = _one({name: kept}, name, "invalid_session_id") if kept else None
            ignored += filter(None, (self._why_none(each.strip()) for each in values))
        if not value:
            return None
        why = self._why_none(value)
        if why is not None:
            ignored.append(why)
            return None
        if not _is_id(value):
            raise _bad_id(value, name.decode())
        return value

    def _of_body(self, body: Mapping[str, str], ignored: list[NoId]) -> Session | None:
        for source in self._bodies:
            text = body.get(source.body, "")
            if source.body == "metadata.user_id":
                said = _of_claude_code(text)
                text = said if said is not None else "" if source.only_claude_codes else text
            own = free_id(text)
            why = None if own.startswith(_HASHED) else self._why_none(own)
            if why:
                ignored.append(why)
            elif own:
                return (own,)
        return None


def _why_none(value: bytes) -> NoId | None:
    """Why a value is no id: it is an unfilled template, or a program's word for nothing. None: it is one, if it is
    anything."""
    if value.lower() in _NOTHING:
        return "nothing"
    return "template" if _has_template(value) else None


def free_id(text: str) -> bytes:
    """Free text as an id: whatever it is, and what is long by its hash, which is quick to remember."""
    value = text.strip().encode("utf-8", "surrogatepass")
    if len(value) <= MAX_ID_BYTES:
        return value
    return _HASHED + hashlib.blake2b(value, digest_size=32).digest()


class _ClaudeCodesUser(msgspec.Struct):
    session_id: str | None = None


_decode_claude_codes_user = msgspec.json.Decoder(_ClaudeCodesUser).decode
_claude_codes_user = re.compile(r"user_\S*_session_(\S+)").fullmatch


def _of_claude_code(user: str) -> str | None:
    """The session in a `metadata.user_id` of Claude Code: `user_HASH_account_UUID_session_UUID`, or JSON with a
    `session_id`. None: it is not Claude Code's."""
    text = user.strip()
    if text.startswith("{"):
        with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            return _decode_claude_codes_user(text).session_id
        return None
    match = _claude_codes_user(text)
    return None if match is None else match[1]


def _final(values: list[bytes]) -> tuple[bool, bool]:
    """Whether it says yes, and whether it says neither yes nor no, as two that differ do."""
    words = {value.strip().lower() for value in values} - {b""}
    final = bool(words) and words <= _TRUE
    return final, not final and not words <= _FALSE


def read_hints(noted: Noted) -> Hints:
    """`noted` holds the values of HINTS. Raises TurnError `invalid_hint`."""
    worker = _one(noted, WORKER_HINT, "invalid_hint")
    return Hints(
        worker.decode("latin-1") if worker else None,
        _rank(noted, RANK_HINT),
        PREFILL_HINTS[0] in noted or PREFILL_HINTS[1] in noted,
    )


def read_prefill_hints(noted: Noted) -> Hints:
    """As `read_hints`, of a turn's prefill."""
    worker = _one(noted, PREFILL_HINTS[0], "invalid_hint")
    return Hints(worker.decode("latin-1") if worker else None, _rank(noted, PREFILL_HINTS[1]))


def _rank(noted: Noted, name: bytes) -> int | None:
    text = _one(noted, name, "invalid_hint")
    if not text:
        return None
    if not text.isdigit() or len(text) > 6:
        shown = _RANK_NAMES[name]
        raise TurnError("invalid_hint", f"{shown} must be a whole number, 0 or more", param=shown)
    return int(text)


_RANK_NAMES = {RANK_HINT: "X-Dynamo-DP-Rank", PREFILL_HINTS[1]: "X-Dynamo-Prefill-DP-Rank"}


def _one(noted: Noted, name: bytes, code: str) -> bytes | None:
    """The single value of a header. Two that differ leave no way to tell which is meant; empty ones say nothing."""
    values = noted.get(name)
    if values is None:
        return None
    if len(values) == 1:
        return values[0].strip()
    distinct = {value.strip() for value in values} - {b""}
    if len(distinct) > 1:
        shown = name.decode()
        raise TurnError(code, f"the request has {len(distinct)} differing {shown} headers; send one", param=shown)
    return next(iter(distinct), None)


def _bad_id(value: bytes, shown: str) -> TurnError:
    if len(value) > MAX_ID_BYTES:
        message = f"{shown} has {len(value)} bytes; at most {MAX_ID_BYTES} are allowed"
    else:
        message = f"{shown} must consist of visible ASCII characters, without spaces"
    return TurnError("invalid_session_id", message, param=shown)


class KeyHasher:
    """Turns (tenant, session) into a claim key. Raw ids never reach a store, a path or a log.

    BLAKE2b with our own personalisation over length-prefixed fields, so that no two pairs collide by
    concatenation; keyed when the operator sets a secret, so that a store's reader cannot test guesses of ids.
    """

    def __init__(self, secret: bytes = b"") -> None:
        """`secret`: at most 64 bytes; the same on every replica."""
        self._base = hashlib.blake2b(digest_size=20, person=b"coatcheck-claim1", key=secret)
        self.key = functools.lru_cache(maxsize=2048)(self._key)
        """40 lower-case hex digits for a tenant and the parts of a Session. Remembered: hashing costs more than the
        rest of a known session's binding."""

    def _key(self, tenant: bytes, *session: bytes) -> str:
        state = self._base.copy()
        state.update(b"%d:%b" % (len(tenant), tenant))
        for part in session:
            state.update(b"%d:%b" % (len(part), part))
        return state.hexdigest()
