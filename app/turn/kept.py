"""What only its maker knows: a stored response, a file, a batch, a conversation.

A worker that makes one answers with its id, and no other worker knows it. So the id gets a claim of its own, made
before the client sees the id, and a request that names the id goes to the worker that the claim says. Such a claim
never moves: what a worker keeps is lost with it.

Nothing is read of other paths' requests and answers than those of `_PATH`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from app.errors import TurnError
from app.fleet.workers import Target
from app.http.headers import Header, header
from app.http.worker import AttemptFailed, ConnectFailed, ConnectRefused
from app.metrics import Metrics
from app.sessions.affinity import Affinity, Binding
from app.sessions.identity import KeyHasher
from app.sessions.placing import Placement
from app.sessions.spread import Hold
from app.sessions.tenants import NOBODY
from app.turn.presence import Presence

COLLECTIONS = {
    "responses": "response",
    "conversations": "conversation",
    "files": "file",
    "batches": "batch",
    "uploads": "upload",
    "vector_stores": "vector store",
    "videos": "video",
    "messages/batches": "message batch",
}
"""Below `/v1/`, with what each holds."""
_PATH = re.compile(rb"/v1/(%b)(?:/([^/]+)(/.*)?)?/?" % "|".join(COLLECTIONS).encode()).fullmatch
_NO_IDS = frozenset({b"compact", b"input_tokens", b"render"})
"""Stand where an id would: calls of `/v1/responses` that keep nothing (the last one is vLLM's)."""
_NAMED = {"previous_response_id": "responses", "conversation": "conversations", "input_file_id": "files"}
"""Members of a request's body that name what is kept, with where."""
_MEMBERS = [b'"%b"' % name.encode() for name in (*_NAMED, "store", "background")]
_LOOSE_BODY = 1024 * 1024
"""Bytes of the largest body that is read as Python's `json` does, which takes more than strict JSON."""
_MAX_ID = 256
_MAX_HELD = 4 * 1024 * 1024
"""Bytes of an answer that are held back for an id at most."""
_LEADING_ID = re.compile(rb'\s*\{\s*"id"\s*:\s*"([^"\\]{1,%d})"' % _MAX_ID).match

Named = tuple[str, bytes]
"""A collection, and an id in it."""


class Use(msgspec.Struct, frozen=True):
    """What a request has to do with what workers keep."""

    collection: str
    named: bytes = b""
    """The id in its path."""
    creates: bool = False
    tells: bool = False
    """Its answer may say ids of what is kept from now on."""
    deletes: bool = False


@functools.lru_cache(maxsize=1024)
def use_of(method: bytes, path: bytes) -> Use | None:
    """None: nothing, as for nearly all requests, which ask for a few paths: looking costs more than remembering."""
    found = _PATH(path)
    if found is None:
        return None
    collection, named, rest = found[1].decode(), found[2], found[3]
    if named is None:
        return Use(collection, creates=True, tells=True) if method == b"POST" else None
    if named in _NO_IDS:
        return Use(collection)
    # A batch says its result's files, an upload its file, when they are there.
    tells = collection in ("batches", "uploads")
    return Use(collection, unquote_to_bytes(named), tells=tells, deletes=method == b"DELETE" and rest in (None, b"/"))


class _Body(msgspec.Struct):
    """The types are the worker's to judge."""

    previous_response_id: Any = None
    conversation: Any = None
    input_file_id: Any = None
    store: Any = None
    background: Any = None


_decode_body = msgspec.json.Decoder(_Body).decode


def read_body(body: bytes) -> _Body:
    """What a body says of what is kept; nothing, where it is no JSON object. Most say nothing, and are not parsed."""
    if not any(member in body for member in _MEMBERS) and b"\0" not in body[:4]:
        return _Body()
    try:
        return _decode_body(body)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        said = json.loads(body) if len(body) <= _LOOSE_BODY else None
    except (ValueError, RecursionError):
        said = None
    said = said if isinstance(said, dict) else {}
    return _Body(*(said.get(name) for name in _Body.__struct_fields__))


def _named_in(body: _Body) -> tuple[str, Named] | None:
    """The member that names what the turn needs, and what it names."""
    for member, collection in _NAMED.items():
        said = getattr(body, member)
        named = _id(said.get("id") if isinstance(said, dict) else said)
        if named is not None:
            return member, (collection, named)
    return None


class _Said(msgspec.Struct):
    """What an answer, or its first event, says of ids."""

    id: Any = None
    output_file_id: Any = None
    error_file_id: Any = None
    file: Any = None
    response: Any = None

    def ids(self, collection: str) -> Iterator[Named]:
        inner = self.response.get("id") if isinstance(self.response, dict) else None
        file = self.file.get("id") if isinstance(self.file, dict) else None
        for where, said in (
            (collection, inner or self.id),
            ("files", self.output_file_id),
            ("files", self.error_file_id),
            ("files", file),
        ):
            named = _id(said)
            if named is not None:
                yield where, named


_decode_said = msgspec.json.Decoder(_Said).decode


def _id(said: object) -> bytes | None:
    if isinstance(said, int) and not isinstance(said, bool):
        said = str(said)
    if not isinstance(said, str):
        return None
    named = said.encode("utf-8", "surrogatepass")
    return named if 0 < len(named) <= _MAX_ID else None


class Kept:
    """A turn's part in what workers keep: where what it names is (`find`), what its answer tells (`keeper`), and that
    something is kept no more (`answered`). `release` when the turn ends."""

    target: Target | None = None
    """Where what the turn names is kept; None: it names nothing, or nothing that is known."""
    how = "none"
    """One of AFFINITY_OUTCOMES: how that is known."""
    asks = False
    """Nobody can say where it is: the workers are asked, one after the other."""
    _binding: Binding | None = None

    def __init__(
        self, use: Use, body: bytes, tenant: bytes, affinity: Affinity, hasher: KeyHasher, metrics: Metrics
    ) -> None:
        """`body`: nothing where the request's is not known whole."""
        self._use, self._tenant = use, tenant
        self._affinity, self._hasher, self._metrics = affinity, hasher, metrics
        self._tells = use.tells
        self._param: str | None = None
        self._named: Named | None = None
        if use.named:
            self._named = (use.collection, use.named)
        elif body:
            said = read_body(body)
            found = _named_in(said)
            if found is not None:
                self._param, self._named = found
            if use.collection == "responses" and said.store is False and not said.background:
                self._tells = False

    # -- what the turn names

    def key(self, named: Named) -> str:
        """No session has it: a session's id is never empty."""
        collection, own = named
        return self._hasher.key(self._tenant, b"", b"kept", collection.encode(), own)

    @property
    def named(self) -> str | None:
        """The key of what the turn names."""
        return None if self._named is None else self.key(self._named)

    async def find(self, presence: Presence) -> None:
        """Set `target`, or `asks`. Raises TurnError, or ClientDisconnected."""
        key = self.named
        if key is None:
            return
        binding = self._affinity.session(key, final=False)
        if not binding.bind_cached():
            try:
                await presence.unless_gone(binding.bind(Placement(refusal=self._unknown(), kept=True)))
            except TurnError as error:
                self._not_found(error)
                return
        self._binding = binding
        self.target, self.how = binding.target, binding.how
        self._metrics.kept.inc("followed")

    def how_beside(self, session: Hold | None) -> str:
        """How the turn came to `target`, with or without a session that is bound."""
        assert self.target is not None
        if session is None:
            return self.how
        if session.target is self.target:
            return session.how
        self._metrics.kept.inc("past_session")
        return self.how

    def _not_found(self, error: TurnError) -> None:
        if error.code == "gone":
            self._metrics.kept.inc("gone")
            raise self._gone() from error
        self._metrics.kept.inc("unknown")
        # Workers know nothing of tenants: one that is asked might answer with what is another tenant's.
        if self._tenant != NOBODY:
            raise error
        self.asks = error.code == "store_unavailable"

    def lost(self, failure: AttemptFailed) -> TurnError:
        """What the client is told when the one worker that will do could not be reached."""
        if isinstance(failure, ConnectFailed) and not isinstance(failure, ConnectRefused):
            return TurnError("worker_unreachable", f"the worker that keeps {self._what} cannot be reached ({failure})")
        self._metrics.kept.inc("gone")
        return self._gone()

    def _unknown(self) -> TurnError:
        return TurnError("not_found", f"{self._what} is not known here", param=self._param)

    def _gone(self) -> TurnError:
        return TurnError("gone", f"{self._what} is gone with the worker that kept it", param=self._param)

    @property
    def _what(self) -> str:
        assert self._named is not None
        collection, own = self._named
        return f"the {COLLECTIONS[collection]} {own.decode('utf-8', 'replace')!r}"

    # -- what is answered

    def answered(self, status: int) -> None:
        """The worker has begun to answer."""
        if self._use.deletes and self._binding is not None and (200 <= status < 300 or status in (404, 410)):
            self._binding.end()

    def keeper(self, status: int, headers: Sequence[Header], target: Target) -> Keeper | None:
        """For an answer that may say ids; None: it says none."""
        if not self._tells or not 200 <= status < 300:
            return None
        kind = (header(headers, b"content-type") or b"").partition(b";")[0].strip().lower()
        streams = kind == b"text/event-stream"
        coded = (header(headers, b"content-encoding") or b"identity").strip().lower() != b"identity"
        if coded or not (streams or kind.endswith(b"json")):
            self._metrics.kept.inc("unread")
            return None
        return Keeper(self, target, streams)

    async def note(self, said: _Said | None, target: Target) -> None:
        """Claim for `target` what it says that it keeps."""
        ids = [] if said is None else [each for each in said.ids(self._use.collection) if each != self._named]
        if not ids and self._use.creates:
            self._metrics.kept.inc("unread")
        outcomes = await asyncio.gather(*(self._affinity.keep(self.key(each), target) for each in ids))
        for outcome in outcomes:
            self._metrics.kept.inc(outcome)

    def release(self) -> None:
        """The turn is over. Idempotent."""
        if self._binding is not None:
            self._binding.release()


class Keeper:
    """Reads ids out of an answer as it comes, and has them claimed."""

    def __init__(self, kept: Kept, target: Target, streams: bool) -> None:
        self._kept, self._target, self._streams = kept, target, streams
        self._said: _Said | None = None

    def has_seen(self, pieces: Sequence[bytes], end: bool) -> bool:
        """Whether enough has come: the whole of a JSON answer, of a stream the event with the id."""
        over = end or sum(map(len, pieces)) > _MAX_HELD
        if self._streams:
            self._said = _first_event(b"".join(pieces))
            return over or self._said is not None
        if over:
            self._said = _read_answer(b"".join(pieces))
        return over

    async def keep(self) -> None:
        await self._kept.note(self._said, self._target)


def _read_answer(body: bytes) -> _Said | None:
    try:
        return _decode_said(body)
    except (msgspec.DecodeError, RecursionError):
        leading = _LEADING_ID(body)
        return None if leading is None else _Said(id=leading[1].decode("utf-8", "replace"))


def _first_event(body: bytes) -> _Said | None:
    """What the first event with an id says."""
    for line in body.splitlines(keepends=True):
        if line.startswith(b"data:") and line.endswith((b"\n", b"\r")):
            try:
                said = _decode_said(line[5:])
            except (msgspec.DecodeError, RecursionError):
                continue
            if next(said.ids(""), None) is not None:
                return said
    return None
