"""`/v1/models`: the workers' lists as one, from memory, and what is below it. A model that a worker lists is answered
from the lists; anything else there (`/v1/models/NAME/ready`) is a turn, and a worker's to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from app.errors import ClientDisconnected, TurnError, error_response
from app.fleet.catalog import Catalog
from app.fleet.models import Listed, ModelLists
from app.http.exchange import Exchange, Proxy, Turn
from app.http.headers import Header, Noted
from app.http.inplace import Driven
from app.turn.presence import Presence
from app.turn.request import Reading, given_id

BELOW = "/v1/models/"
_TOLD = frozenset({b"content-type", b"www-authenticate", b"retry-after", b"x-should-retry"})
"""Headers of a worker's refusal that its client is told."""
_encode = msgspec.json.Encoder().encode
_read_entry = msgspec.json.Decoder(dict[str, Any]).decode

Whole = tuple[int, list[Header], bytes]
"""An answer: status, headers, body."""


class Models:
    """What clients are told of the workers' models."""

    def __init__(self, lists: ModelLists, catalog: Catalog, reading: Callable[[], Reading]) -> None:
        """`reading` answers the router's, which may change."""
        self._lists, self._catalog, self._reading = lists, catalog, reading

    async def all(self, headers: Sequence[Header]) -> Whole:
        """For a request with these headers, names lower-case. Errors are answers."""
        return await self._answered(headers, _whole_list)

    async def one(self, headers: Sequence[Header], name: str) -> Whole | None:
        """None: no worker that answered has a model of this name."""
        answer = await self._answered(headers, lambda listed: _entry(listed, name))
        return answer if answer[0] else None

    async def _answered(self, headers: Sequence[Header], tell: Callable[[Listed], Whole]) -> Whole:
        noted: Noted = {}
        for name, value in headers:
            noted.setdefault(name.lower(), []).append(value)
        reading = self._reading()
        request_id = given_id(noted) or reading.next_id()
        try:
            asks = [*reading.speaks_for(noted), (b"x-request-id", request_id)]
            listed = await self._listed(asks)
            status, told, body = tell(_with_aliases(listed, reading.aliases) if reading.aliases else listed)
        except TurnError as error:
            status, told, body = error_response(error)
        return status, [*told, (b"x-request-id", request_id)], body

    async def _listed(self, asks: list[Header]) -> Listed:
        """From memory; workers that show their lists to clients' own keys only are asked with this client's, and all
        are when no list is known. Raises TurnError."""
        known = self._catalog.entries()
        if known is None:
            return await self._lists.ask(asks)
        refused = self._catalog.refused()
        shown = (await self._lists.ask(asks, refused)).models if refused else {}
        return Listed(models=known | {name: entry for name, entry in shown.items() if name not in known}, lists=1)


def _with_aliases(listed: Listed, aliases: Mapping[str, str]) -> Listed:
    """Aliases of models that are there, with what is said of those; their `root` is the model that is meant."""
    models = dict(listed.models)
    for alias, model in aliases.items():
        if model in listed.models:
            said = _read_entry(listed.models[model])
            models[alias] = msgspec.Raw(_encode({**said, "id": alias, "root": model}))
    return msgspec.structs.replace(listed, models=models)


def _whole_list(listed: Listed) -> Whole:
    """Raises TurnError."""
    if listed.lists:
        return _json({"object": "list", "data": list(listed.models.values())})
    if listed.refusal is None:
        raise listed.failure
    worker, answer = listed.refusal
    headers = [pair for pair in answer.headers if pair[0] in _TOLD]
    headers += ((b"content-length", b"%d" % len(answer.body)), (b"x-coatcheck-worker", worker.name.encode()))
    return answer.status, headers, answer.body


def _entry(listed: Listed, name: str) -> Whole:
    found = listed.models.get(name) or listed.models.get(unquote(name))
    return (0, [], b"") if found is None else _json(found)


def _json(value: Any) -> Whole:
    body = _encode(value)
    return 200, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))], body


class OneModel:
    """The proxy of what is below /v1/models/."""

    def __init__(self, models: Models, turns: Proxy) -> None:
        self._models, self._turns = models, turns

    def open(self, exchange: Exchange, over: Callable[[Exception | None], None]) -> Turn:
        if exchange.method not in (b"GET", b"HEAD") or exchange.switches or exchange.more_body:
            return self._turns.open(exchange, over)
        return _ModelTurn(self._models, self._turns, exchange, over)


class _ModelTurn:
    """Asks the lists, and then answers or becomes a turn."""

    _cancelled = False

    def __init__(
        self, models: Models, turns: Proxy, exchange: Exchange, over: Callable[[Exception | None], None]
    ) -> None:
        self._models, self._turns, self._exchange, self._over = models, turns, exchange, over
        self._presence = Presence(asyncio.get_running_loop())
        self._driven = Driven(self._returned, over)
        self._turn: Turn | None = None

    async def _run(self) -> Whole | None:
        path = unquote(self._exchange.raw_path.decode("ascii"))
        try:
            return await self._presence.unless_gone(self._models.one(self._exchange.headers, path.removeprefix(BELOW)))
        except ClientDisconnected:
            return None

    def _returned(self, answer: Whole | None) -> None:
        if self._presence.gone or self._cancelled:
            self._over(None)
        elif answer is None:
            self._turn = turn = self._turns.open(self._exchange, self._over)
            turn.start()
        else:
            status, headers, body = answer
            self._exchange.start(status, headers)
            self._exchange.write(body, True)
            self._over(None)

    # -- called from the client's connection

    def start(self) -> None:
        self._driven.start(self._run())

    def cancel(self) -> None:
        self._cancelled = True
        (self._driven if self._turn is None else self._turn).cancel()

    def client_left(self) -> None:
        if self._turn is not None:
            self._turn.client_left()
        else:
            self._presence.left()

    def client_took(self) -> None:
        if self._turn is not None:
            self._turn.client_took()
