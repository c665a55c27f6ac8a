"""Asking the workers for the lists of what they serve. What is remembered of them is in `catalog`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import httpx
import msgspec

from app.errors import TurnError
from app.fleet.asking import Answered, Asked, ask, asking_client
from app.fleet.workers import Fleet, Tls, Worker
from app.http.headers import Header, header

_WITHIN = 1.5
"""Seconds that a worker has for its whole list; clients are promised an answer within 2."""
_LIST_BYTES = 1 << 20
_NOT_WAITED_FOR = 10.0
"""Seconds in which a worker that was late is not asked again, while others are there."""
_ON_THE_LOOP = 1 << 16
"""Bytes of a list that are read where everything else waits for it; longer ones in a thread."""


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


class _Entry(msgspec.Struct):
    id: str


_read_list = msgspec.json.Decoder(_List).decode
_read_entry = msgspec.json.Decoder(_Entry).decode


_NO_ANSWER = TurnError("worker_unreachable", "no worker answered with its models")


class Listed(msgspec.Struct, frozen=True):
    """What the workers that were asked said: `models`, id → entry, each id once in the workers' order."""

    models: dict[str, msgspec.Raw]
    lists: int
    """How many of them gave one."""
    refusal: tuple[Worker, Answered] | None = None
    """Of those that answered with an error; one that blames the request, if there is any."""
    failure: TurnError = _NO_ANSWER
    """Why there is nothing, if there is neither."""


class ModelLists:
    """Asks for the lists, and remembers who was late."""

    def __init__(self, fleet: Fleet, tls: Tls, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`tls` is for https workers."""
        self._fleet, self._tls, self._clock = fleet, tls, clock
        self._late_until: dict[str, float] = {}

    def client(self) -> httpx.AsyncClient:
        """For `read`; the caller closes it."""
        return asking_client(self._tls)

    async def read(self, client: httpx.AsyncClient, worker: Worker, headers: list[Header]) -> dict[str, msgspec.Raw]:
        """One worker's list: id → entry. Raises TurnError: `invalid_api_key` when it wants another key than `headers`
        have."""
        asked = Asked(b"/v1/models", headers)
        answer = await ask(client, worker, asked, seconds=_WITHIN, size=_LIST_BYTES)
        if answer.status in (401, 403):
            raise TurnError("invalid_api_key", f"the worker refuses its list to the router ({answer.status})")
        return await _read(answer)

    async def ask(self, headers: list[Header], among: Iterable[Worker] | None = None) -> Listed:
        """Ask all workers, or those `among` them, at once, with `headers`. Raises TurnError `no_worker`."""
        workers, now = list(self._fleet if among is None else among), self._clock()
        if not workers:
            raise TurnError("no_worker", "no worker is configured; start the router with --worker URL")
        # When all were late, asking beats refusing.
        prompt = [each for each in workers if now >= self._late_until.get(each.name, now)] or workers
        asked = Asked(b"/v1/models", headers)
        async with asking_client(self._tls) as client:
            answers = await asyncio.gather(
                *(ask(client, each, asked, seconds=_WITHIN, size=_LIST_BYTES) for each in prompt),
                return_exceptions=True,
            )
        return await self._sorted(prompt, answers)

    async def _sorted(self, workers: list[Worker], answers: list[Answered | BaseException]) -> Listed:
        now = self._clock()
        self._late_until = {name: until for name, until in self._late_until.items() if until > now}
        models: dict[str, msgspec.Raw] = {}
        lists = 0
        refusals: list[tuple[Worker, Answered]] = []
        failures: list[TurnError] = []
        for worker, answer in zip(workers, answers, strict=True):
            late = isinstance(answer, TurnError) and answer.code == "worker_timeout"
            if late:
                self._late_until[worker.name] = now + _NOT_WAITED_FOR
            else:
                self._late_until.pop(worker.name, None)
            if isinstance(answer, TurnError):
                failures.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif 400 <= answer.status <= 599:
                refusals.append((worker, answer))
            else:
                try:
                    found = await _read(answer)
                except TurnError as unreadable:
                    failures.append(unreadable)
                else:
                    lists += 1
                    for name, entry in found.items():
                        models.setdefault(name, entry)
        refusal = next((each for each in refusals if each[1].status < 500), refusals[0] if refusals else None)
        return Listed(models, lists, refusal, failures[0] if failures else _NO_ANSWER)


async def _read(answer: Answered) -> dict[str, msgspec.Raw]:
    """Raises TurnError."""
    wrong = None
    if answer.status != 200:
        wrong = f"has the status {answer.status}"
    elif answer.cut:
        wrong = f"is longer than {_LIST_BYTES} bytes"
    elif header(answer.headers, b"content-encoding") not in (None, b"identity"):
        wrong = "is compressed, which was not asked for"
    else:
        try:
            if len(answer.body) <= _ON_THE_LOOP:
                return _entries(answer.body)
            return await asyncio.to_thread(_entries, answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            wrong = "is no list of models"
    raise TurnError("worker_bad_response", f"the worker's answer to GET /v1/models {wrong}")


def _entries(body: bytes) -> dict[str, msgspec.Raw]:
    """Those that have an id. Raises msgspec.DecodeError or UnicodeDecodeError."""
    body.decode()  # an entry is passed on without a look at all of it
    found: dict[str, msgspec.Raw] = {}
    for entry in _read_list(body).data:
        try:
            found.setdefault(_read_entry(entry).id, msgspec.Raw(bytes(entry)))
        except msgspec.DecodeError:
            continue
    return found
