"""Which session a turn belongs to, read from its headers. Pure.

The first source that carries an id decides. A request id is never taken for a session id: it would send every turn to
a new place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from app.errors import TurnError
from app.headers import Header

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
_OURS = frozenset({*SESSION_SOURCES, *PARENT_SOURCES, FINAL, WORKER_HINT, RANK_HINT})
_TRUE = frozenset({b"1", b"true", b"yes", b"on"})


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


_NOBODY = Identity()


def identify(headers: Iterable[Header]) -> Identity:
    """Raises TurnError `invalid_session_id` or `invalid_hint`."""
    found: dict[bytes, list[bytes]] | None = None
    for name, value in headers:
        if name in _OURS:
            if found is None:
                found = {}
            found.setdefault(name, []).append(value.strip())
    if found is None:
        return _NOBODY
    rank_text = _one(found, RANK_HINT, "invalid_hint")
    rank: int | None = None
    if rank_text:
        if not rank_text.isdigit() or len(rank_text) > 6:
            raise TurnError(
                "invalid_hint", "X-Dynamo-DP-Rank must be a whole number, 0 or more", param="X-Dynamo-DP-Rank"
            )
        rank = int(rank_text)
    worker = _one(found, WORKER_HINT, "invalid_hint")
    final = found.get(FINAL)
    return Identity(
        session=_first_id(found, SESSION_SOURCES),
        parent=_first_id(found, PARENT_SOURCES),
        final=final is not None and any(value.lower() in _TRUE for value in final),
        worker_hint=worker.decode("latin-1") if worker else None,
        rank_hint=rank,
    )


def _first_id(found: dict[bytes, list[bytes]], sources: tuple[bytes, ...]) -> bytes | None:
    for source in sources:
        value = _one(found, source, "invalid_session_id")
        if value:
            return _checked(value, source)
    return None


def _one(found: dict[bytes, list[bytes]], name: bytes, code: str) -> bytes | None:
    """The single value of a header. Two that differ leave no way to tell which is meant; empty ones say nothing."""
    distinct = {value for value in found.get(name, ()) if value}
    if len(distinct) > 1:
        shown = name.decode()
        raise TurnError(code, f"the request has {len(distinct)} differing {shown} headers; send one", param=shown)
    return next(iter(distinct), None)


def _checked(value: bytes, source: bytes) -> bytes:
    shown = source.decode()
    if len(value) > MAX_ID_BYTES:
        raise TurnError(
            "invalid_session_id", f"{shown} has {len(value)} bytes; at most {MAX_ID_BYTES} are allowed", param=shown
        )
    # Visible ASCII only: an id is an opaque token, and anything else differs between encodings on its way here.
    if not all(0x21 <= byte <= 0x7E for byte in value):
        raise TurnError(
            "invalid_session_id", f"{shown} must consist of visible ASCII characters, without spaces", param=shown
        )
    return value


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
