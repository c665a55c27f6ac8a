"""What is read of a request, and what of it goes on to a worker (`Request`); and the rules of both (`Reading`)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from app.errors import TurnError
from app.fleet.placement.foresight import Foreseen
from app.fleet.workers import Target
from app.http.exchange import Exchange
from app.http.headers import FORWARDED, NOT_TO_WORKER, Forwarding, Header, Noted, Origin, response_headers, sort_request
from app.http.inplace import Wake
from app.http.response import Expected
from app.http.worker import WorkerConnection
from app.metrics import BodyUnread
from app.sessions.identity import HINTS, Identifier, Identity
from app.sessions.tenants import (
    ADMIN_TOKEN,
    CREDENTIALS,
    FOREIGN,
    NOBODY,
    PROTOCOLS,
    Tenants,
    protocols_without_keys,
)
from app.turn.fields import FieldReader, Fields, Prompts, TooLarge, with_model
from app.turn.tracing import TRACEPARENT

DRY_RUN = b"x-coatcheck-dry-run"
"""Asks where a turn would go, without sending it there."""
_WANTED = HINTS | {DRY_RUN} | {b"content-length", b"content-type", b"content-encoding", b"x-request-id", b"host"}
_YES = frozenset({b"1", b"true", b"yes", b"on"})
_STREAMED_FROM = 256 * 1024
"""Bytes from which on a request body that says nothing of routing goes through as it comes; smaller ones, whole, can be
sent again."""
COPIED = 65536
"""Bytes of a body up to which it is sent in one piece with its head."""
_EMPTY_BODY_METHODS = frozenset({b"POST", b"PUT", b"PATCH"})
"""Methods whose requests say `content-length: 0` when they have no body (RFC 9110 8.6)."""


_JSON = [b"application/json"]
_NO_FIELDS = Fields()
_NO_IDENTITY = Identity()


class Reading:
    """What a router reads of every request, and what it sends on. Fixed from the start but for the count of ids."""

    def __init__(
        self,
        *,
        identifier: Identifier | None = None,
        tenants: Tenants | None = None,
        forwarding: Forwarding | None = None,
        worker_key: bytes = b"",
        rank_header: bytes = b"x-data-parallel-rank",
        has_ranks: bool = False,
        body_limit: int = 64 * 1024 * 1024,
        judges_hints: bool = True,
        aliases: Mapping[str, str] | None = None,
        traced: bool = False,
        prompts: Prompts = "no",
    ) -> None:
        """Left out: the default sources of ids, no API keys, no trusted proxies, no aliases of models.

        `worker_key` is sent to the workers in place of the client's key; empty: the client's is passed on.
        `rank_header`, in lower case, tells a worker the rank (the default is vLLM's); where a worker of the fleet
        `has_ranks` it is ours to say. `body_limit` in bytes. Without `judges_hints`
        placement hints are for somebody behind this router. `traced`: whose work a request is, is said anew to its
        worker. `prompts`: turns are placed by them."""
        self.identifier = identifier or Identifier()
        self.forwarding = forwarding or Forwarding()
        self.tenants = tenants if tenants is not None and len(tenants) else None
        self.body_limit = body_limit
        self.rank_line = b"\r\n%b: %%d" % rank_header
        self.worker_key = worker_key
        self.key_line = worker_key_line(worker_key)
        self.judges_hints = judges_hints
        self.aliases = dict(aliases or {})
        """What clients may call a model → its name."""
        self.fields = FieldReader(self.identifier.body_fields, prompts=prompts)
        self.rare = HINTS | {DRY_RUN} if judges_hints else frozenset({DRY_RUN})
        self.wanted = _WANTED | FORWARDED | self.identifier.wanted | self.identifier.unread
        kept_back = NOT_TO_WORKER | {DRY_RUN, ADMIN_TOKEN}
        self.keeps_credentials = self.tenants is not None or bool(worker_key)
        """Of those that a client sends, no worker gets any but the one that is valid here, or it gets ours."""
        if self.tenants is not None:
            self.wanted |= CREDENTIALS
            kept_back |= FOREIGN
        if self.keeps_credentials:
            self.wanted |= {PROTOCOLS}
            kept_back |= CREDENTIALS | {PROTOCOLS}
        if traced:
            kept_back |= {TRACEPARENT}
        self.has_ranks = has_ranks
        if has_ranks:
            kept_back |= {rank_header}
        self.kept_back = kept_back | FORWARDED
        self.kept_back_of_trusted = kept_back | {b"x-forwarded-for"}
        self._ids = itertools.count(1)
        self._id_prefix = os.urandom(8).hex().encode()

    def next_id(self) -> bytes:
        """For a request that brings none."""
        return b"%b-%x" % (self._id_prefix, next(self._ids))

    def speaks_for(self, noted: Noted) -> list[Header]:
        """The credentials with which the router asks workers for a client, whose headers are `noted`.
        Raises TurnError `invalid_api_key`."""
        said = None if self.tenants is None else self.tenants.recognise(noted)[1]
        if self.worker_key:
            return [(b"authorization", b"Bearer " + self.worker_key)]
        others = [b"openai-organization", b"openai-project"]
        if self.tenants is None:
            others += sorted(CREDENTIALS)
        passed = [(name, value) for name in others for value in noted.get(name, ())]
        return passed if said is None else [said, *passed]


class Request:
    """One request, from its first byte to the last that goes on to a worker."""

    # Defaults in the class: these are set before they are looked at, or seldom looked at.
    id = b""
    tenant = NOBODY
    identity = _NO_IDENTITY
    fields = _NO_FIELDS
    misfits = 0
    """Hints in the body that are of a type that no hint has."""
    unread: BodyUnread | None = None
    """Why its body was not looked through for a session's id."""
    prompt: Foreseen | None = None
    """Of a turn that is free to choose, if its policy places by that."""
    body = b""
    """All of it, or its first piece when there is `more`."""
    noted: Noted
    """Set by `read_head`."""
    _lines = b""
    _origin: Origin | None = None
    """Of the worker that it was sent to."""
    _length = -1
    """Of the body, as the head declares it; -1: it does not."""
    _routable = True
    """The body may say where the turn is to go: it is JSON, or does not say what it is."""

    def __init__(self, reading: Reading, exchange: Exchange) -> None:
        self._reading, self._exchange = reading, exchange
        self.dry_run = False
        self.may_hint = False
        """There may be hints in it; most requests have none, and nobody need look."""
        self.more = False
        """The rest of the body says nothing of routing and goes through as it comes."""
        self.once = bool(exchange.switches)
        """It cannot be sent a second time."""
        self.trace_line = b""
        """Says to the worker for which attempt it works; empty: that is for the client to say."""

    @property
    def path(self) -> bytes:
        return self._exchange.raw_path

    def read_head(self) -> None:
        """Who asks, and the session's identity. Raises TurnError."""
        reading, exchange = self._reading, self._exchange
        peer = exchange.peer
        forwarding = reading.forwarding
        trusted = forwarding.trusts_some and forwarding.trusts(peer)
        kept_back = reading.kept_back_of_trusted if trusted else reading.kept_back
        lines, noted = sort_request(exchange.headers, reading.wanted, kept_back)
        self.noted = noted
        self._lines = lines + forwarding.lines(peer or "", exchange.scheme, noted, trusted)
        self.id = (given_id(noted) if b"x-request-id" in noted else None) or reading.next_id()
        if reading.keeps_credentials:
            self._keep_credentials(noted)
        if not reading.rare.isdisjoint(noted):
            self.may_hint = reading.judges_hints
            self.dry_run = DRY_RUN in noted and noted[DRY_RUN][0].strip().lower() in _YES
        self.identity = reading.identifier.identify(noted)

    def _keep_credentials(self, noted: Noted) -> None:
        """Raises TurnError `invalid_api_key`."""
        reading = self._reading
        if reading.tenants is not None:
            self.tenant, said = reading.tenants.recognise(noted)
            if said is not None and not reading.key_line:
                self._lines += b"%b: %b\r\n" % said
        if PROTOCOLS in noted and (words := protocols_without_keys(noted)):
            self._lines += b"%b: %b\r\n" % (PROTOCOLS, words)

    def read_body(self) -> Coroutine[Any, Any, None] | None:
        """The body (capped), and the fields that routing needs. Returns what is to be awaited for that, where it
        has not come yet. Raises TurnError or ClientDisconnected."""
        noted, reading = self.noted, self._reading
        cap = reading.body_limit
        declared = noted.get(b"content-length")
        if declared is not None:
            self._length = int(declared[0])
            if self._length > cap:
                raise _too_large(cap)
        whole = True
        if b"content-encoding" in noted or noted.get(b"content-type") != _JSON:
            may_be_json, coded = _may_be_json(noted), _is_coded(noted)
            if may_be_json and coded:
                self.unread = "compressed"
            self._routable = may_be_json and not coded
            whole = self._routable or 0 <= self._length <= _STREAMED_FROM
        least = cap + 1 if whole else 1
        come = self._exchange.received_already(least)
        if come is None:
            return self._await_body(least, whole)
        self._take_body(come[0], come[1], whole)
        return None

    async def _await_body(self, least: int, whole: bool) -> None:
        body, more = await self._exchange.receive(least)
        self._take_body(body, more, whole)

    def _take_body(self, body: bytes, more: bool, whole: bool) -> None:
        reading = self._reading
        if len(body) > reading.body_limit or (whole and more):
            raise _too_large(reading.body_limit)
        self.body = body
        if more:
            self.more = self.once = True
            return
        if body:
            self._read_fields(body)
            if reading.aliases and self.fields.model in reading.aliases:
                self._rename(reading.aliases[self.fields.model])

    def _read_fields(self, body: bytes) -> None:
        """What cannot be read is the worker's business: it knows better what is wrong with it, if anything is."""
        reading = self._reading
        identifier = reading.identifier
        unnamed = identifier.reads_body and self.identity.session is None
        ids: dict[str, str] = {}
        try:
            if unnamed:
                self.fields = reading.fields.decode_with_ids(body)
                ids = reading.fields.ids(self.fields)
            else:
                self.fields = reading.fields.decode(body)
        except (msgspec.DecodeError, RecursionError):
            if not self._routable:
                return
            try:
                found = reading.fields.find(body)
            except TooLarge:
                self.unread = "large"
                return
            if found is None:
                self.unread = "malformed"
                return
            self.fields, ids, self.misfits = found.fields, found.ids, found.misfits
        if self.fields.nvext is not None or self.misfits:
            self.may_hint = reading.judges_hints
        if unnamed and ids:
            self.identity = identifier.identify(self.noted, ids)

    def _rename(self, model: str) -> None:
        """The client has used an alias of this model. Raises TurnError."""
        said = self.fields.model or ""
        try:
            body = with_model(self.body, said, model)
        except TooLarge:
            # To be sent on as it is would be to be refused by a worker that does not know the alias.
            why = f"the body is too intricate for the alias {said!r}; name the model {model!r} itself"
            raise TurnError("request_too_large", why, param="model") from None
        if body is None:
            raise TurnError("invalid_request", f"name the model {model!r} itself, not {said!r}", param="model")
        self.body, self.fields.model = body, model

    # -- on its way to a worker

    def send(self, connection: WorkerConnection, target: Target) -> Wake:
        """Head and body, or as much of it as is there. As `WorkerConnection.send`."""
        self._origin = target.worker.origin
        body = self.body
        if not self.once and self._exchange.method != b"HEAD":
            if len(body) <= COPIED:
                return connection.send(self._head(target, body, body), b"", on_interim=self._pass_interim)
            return connection.send(self._head(target, body), body, on_interim=self._pass_interim)
        head = self._head(target, body)
        expected = Expected.HEAD if self._exchange.method == b"HEAD" else Expected.ANSWER
        return connection.send(
            head,
            _chunk(body) if self.more and self._length < 0 else body,
            expected=Expected.SWITCH if self._exchange.switches else expected,
            on_interim=self._pass_interim,
            more=self.more,
        )

    def whole(self, target: Target, body: bytes) -> bytes:
        """Head and body for `target`, for who sends it beside the turn, which is one that can be sent again."""
        return self._head(target, body, body)

    def _head(self, target: Target, body: bytes, behind: bytes = b"") -> bytes:
        """As `target` gets it that gets this `body`, with what is sent `behind` it in one piece."""
        exchange, reading, worker = self._exchange, self._reading, target.worker
        parts = [
            exchange.method,
            b" ",
            worker.base_path,
            exchange.raw_path,
            b"?" if exchange.query else b"",
            exchange.query,
            worker.host_line,
            reading.key_line,
            self._lines,
            self.trace_line,
            b"x-request-id: ",
            self.id,
        ]
        if target.rank is not None:
            parts.append(reading.rank_line % target.rank)
        if exchange.switches:
            parts.append(b"\r\nconnection: upgrade\r\nupgrade: %b" % exchange.switches)
        elif self.more:
            parts.append(
                b"\r\ntransfer-encoding: chunked" if self._length < 0 else b"\r\ncontent-length: %d" % self._length
            )
        elif body or self._length >= 0 or exchange.method in _EMPTY_BODY_METHODS:
            parts.append(b"\r\ncontent-length: %d" % len(body))
        parts += (b"\r\n\r\n", behind)
        return b"".join(parts)

    async def send_rest(self, connection: WorkerConnection) -> None:
        """The rest of a body that goes through as it comes, or all that is said in another protocol.
        Raises TurnError or ClientDisconnected."""
        switched = bool(self._exchange.switches)
        chunked = self._length < 0 and not switched
        cap, size, more = self._reading.body_limit, len(self.body), True
        while more:
            piece, more = await self._exchange.receive()
            size += len(piece)
            if size > cap and not switched:
                raise _too_large(cap)
            if chunked:
                piece = _chunk(piece) if more else _chunk(piece) + b"0\r\n\r\n"
            await connection.write(piece)
        connection.uploading = False
        self._exchange.watch()

    def _pass_interim(self, status: int, headers: list[Header]) -> None:
        """A worker's 1xx, to the client."""
        self._exchange.interim(status, response_headers(headers, status, self._origin))


def worker_key_line(key: bytes) -> bytes:
    """The header with the workers' key, if they want one."""
    return b"authorization: Bearer %b\r\n" % key if key else b""


def given_id(noted: Noted) -> bytes | None:
    """A request's own id, where it brings one that can be used."""
    values = noted.get(b"x-request-id")
    return values[0] if values and 0 < len(values[0]) <= 128 and values[0].isascii() else None


def _is_coded(noted: Noted) -> bool:
    codings = noted.get(b"content-encoding")
    return codings is not None and any(coding.strip().lower() not in (b"", b"identity") for coding in codings)


def _may_be_json(noted: Noted) -> bool:
    kind = noted.get(b"content-type")
    if kind is None or kind[0] == b"application/json":
        return True
    # Parameters say nothing of it (RFC 9110 8.3.1, RFC 6839 3.1).
    media = kind[0].partition(b";")[0].strip().lower()
    return media == b"application/json" or media.endswith(b"+json")


def _chunk(data: bytes) -> bytes:
    """One chunk of a body without a length (RFC 9112 7.1). Of no bytes none: that would be the end."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _too_large(cap: int) -> TurnError:
    return TurnError("request_too_large", f"the request body is larger than {cap} bytes")
