"""Which session a turn belongs to, read from its headers. Pure.

The first source that carries an id decides. A request id is never taken for a session id: it would send every turn to
a new place.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from app.errors import TurnError
from app.headers import Noted

MAX_ID_BYTES = 256

SESSION_SOURCES = (
    b"x-dynamo-session-id",
    b"x-claude-code-session-id",  # Claude Code
    b"thread-id",  # Codex
    b"session-id",  # Codex before
    b"x-session-id",  # OpenCode
)
PARENT_SOURCES = (
    b"x-dynamo-parent-session-id",
    b"x-codex-parent-thread-id",
    b"x-parent-session-id",
)
FINAL = b"x-dynamo-session-final"
WORKER_HINT = b"x-dynamo-worker-instance-id"
RANK_HINT = b"x-dynamo-dp-rank"
HEADERS = frozenset({*SESSION_SOURCES, *PARENT_SOURCES, FINAL, WORKER_HINT, RANK_HINT})
"""Every header that `identify` reads."""

_TRUE = frozenset({b"1", b"true", b"yes", b"on"})
# Visible ASCII only: an id is an opaque token, and anything else differs between encodings on its way here.
_is_id = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_ID_BYTES).fullmatch


class Identity(msgspec.Struct, frozen=True):
    """What a turn's headers say about its session."""

    session: bytes | None = None
    parent: bytes | None = None
    final: bool = False
    worker_hint: str | None = None
    rank_hint: int | None = None

    @property
    def hinted(self) -> bool:
        return self.worker_hint is not None or self.rank_hint is not None


def identify(noted: Noted) -> Identity:
    """`noted` holds the values of HEADERS. Raises TurnError `invalid_session_id` or `invalid_hint`."""
    final = noted.get(FINAL)
    worker = _one(noted, WORKER_HINT, "invalid_hint")
    return Identity(
        _first_id(noted, SESSION_SOURCES),
        _first_id(noted, PARENT_SOURCES),
        final is not None and any(value.strip().lower() in _TRUE for value in final),
        worker.decode("latin-1") if worker else None,
        _rank(noted) if RANK_HINT in noted else None,
    )


def _first_id(noted: Noted, sources: tuple[bytes, ...]) -> bytes | None:
    for source in sources:
        if source in noted:
            value = _one(noted, source, "invalid_session_id")
            if value:
                if not _is_id(value):
                    raise _bad_id(value, source)
                return value
    return None


def _rank(noted: Noted) -> int | None:
    text = _one(noted, RANK_HINT, "invalid_hint")
    if not text:
        return None
    if not text.isdigit() or len(text) > 6:
        raise TurnError("invalid_hint", "X-Dynamo-DP-Rank must be a whole number, 0 or more", param="X-Dynamo-DP-Rank")
    return int(text)


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


def _bad_id(value: bytes, source: bytes) -> TurnError:
    shown = source.decode()
    if len(value) > MAX_ID_BYTES:
        message = f"{shown} has {len(value)} bytes; at most {MAX_ID_BYTES} are allowed"
    else:
        message = f"{shown} must consist of visible ASCII characters, without spaces"
    return TurnError("invalid_session_id", message, param=shown)


class KeyHasher:
    """Turns (tenant, session id) into a claim key. Raw ids never reach a store, a path or a log.

    BLAKE2b with our own personalisation over length-prefixed fields, so that no two pairs collide by
    concatenation; keyed when the operator sets a secret, so that a store's reader cannot test guesses of ids.
    """

    def __init__(self, secret: bytes = b"") -> None:
        """`secret`: at most 64 bytes; the same on every replica."""
        self._base = hashlib.blake2b(digest_size=20, person=b"coatcheck-claim1", key=secret)

    def key(self, tenant: bytes, session: bytes) -> str:
        """40 lower-case hex digits."""
        state = self._base.copy()
        state.update(b"%d:%b%d:%b" % (len(tenant), tenant, len(session), session))
        return state.hexdigest()
