"""Paths that change workers (adapters, sleep, weights, profiles, caches): an admin's request goes to one worker or to
all, and each one's answer comes back. For everybody else there is nothing here."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Request

from app.errors import TABLE, TurnError
from app.fleet.asking import Answered, Asked, ask, asking_client
from app.fleet.policies import WORKER_HINT
from app.fleet.workers import Fleet, Tls, Worker
from app.http.headers import Header, Noted, header
from app.sessions.identity import read_hints
from app.sessions.tenants import ADMIN_TOKEN, Admins, credential
from app.turn.paths import is_plain
from app.turn.request import Reading, given_id

log = logging.getLogger("coatcheck.management")

_ANSWER_BYTES = 1 << 20
"""Of one worker's answer; what is longer is cut, and said to be."""
_LONGEST = 600.0
"""Seconds for a worker's answer where the settings have no limit."""
_SENT_ON = frozenset({b"content-type", b"accept"})
_encode = msgspec.json.Encoder().encode


class Management:
    """Answers these paths."""

    def __init__(
        self,
        fleet: Fleet,
        tls: Tls,
        admins: Admins,
        reading: Callable[[], Reading],
        *,
        admin_token: str,
        seconds: float,
    ) -> None:
        """`reading` answers the router's, which may change. `admin_token` never reaches a worker. `seconds` for a
        worker's answer; 0: the longest that there is."""
        self._fleet, self._tls, self._admins, self._reading = fleet, tls, admins, reading
        self._admin_token, self._seconds = admin_token.encode(), seconds or _LONGEST

    async def answer(self, request: Request) -> tuple[int, list[Header], bytes]:
        """Status, headers and body. Raises TurnError."""
        path, headers = request.scope["path"], request.headers.raw
        host = request.client.host if request.client is not None else None
        if not self._admins.allows(host, headers):
            raise TurnError(
                "forbidden",
                f"{request.method} {path} can change workers: it needs an admin, who comes from the router's own "
                "machine or sends the admin token in X-Coatcheck-Admin-Token",
            )
        target = bytes(request.scope["raw_path"])
        if not is_plain(target.decode("latin-1")):
            raise TurnError("invalid_request", "a path that changes workers must be spelled plainly")
        if request.scope["query_string"]:
            target += b"?" + request.scope["query_string"]
        noted: Noted = {}
        for name, value in headers:
            noted.setdefault(name.lower(), []).append(value)
        workers = self._chosen(noted)
        request_id = given_id(noted) or self._reading().next_id()
        sent = [(name, value) for name in _SENT_ON for value in noted.get(name, ())]
        sent += [*self._credentials(noted), (b"x-request-id", request_id)]
        asked = Asked(target, sent, request.method, await request.body())
        log.info("%s %s goes to %s", asked.method, path, ", ".join(worker.name for worker in workers))
        async with asking_client(self._tls) as client:
            answers = await asyncio.gather(
                *(ask(client, worker, asked, seconds=self._seconds, size=_ANSWER_BYTES) for worker in workers),
                return_exceptions=True,
            )
        told = [_told(worker, answer) for worker, answer in zip(workers, answers, strict=True)]
        worst = max(each["status"] for each in told)
        body = _encode({"object": "coatcheck.management", "path": path, "workers": told})
        kept = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        return worst if worst >= 300 else 200, [*kept, (b"x-request-id", request_id)], body

    def _chosen(self, noted: Noted) -> list[Worker]:
        """Raises TurnError."""
        name = read_hints(noted).worker
        if name is None:
            workers = list(self._fleet)
            if not workers:
                raise TurnError("no_worker", "this router has no worker")
            return workers
        worker = self._fleet.worker(name)
        if worker is None:
            names = ", ".join(worker.name for worker in self._fleet)
            message = f"{WORKER_HINT} names no worker of this router; it has {names}"
            raise TurnError("unknown_worker", message, param=WORKER_HINT)
        return [worker]

    def _credentials(self, noted: Noted) -> list[Header]:
        """Ours for the workers, else what the admin has sent them besides the admin token."""
        reading = self._reading()
        if reading.worker_key:
            return [(b"authorization", b"Bearer " + reading.worker_key)]
        if reading.tenants is not None:
            return []
        found = []
        for name in (b"authorization", b"x-api-key"):
            for value in noted.get(name, ()):
                key = credential({name: [value]}) or value
                secrets = (self._admin_token, *noted.get(ADMIN_TOKEN, ()))
                if not any(secret and hmac.compare_digest(key, secret) for secret in secrets):
                    found.append((name, value))
        return found


def _told(worker: Worker, answer: Answered | BaseException) -> dict[str, Any]:
    """Raises what is no failure of the worker."""
    if isinstance(answer, TurnError):
        error = {"message": str(answer), "code": answer.code}
        return {"worker": worker.name, "status": TABLE[answer.code].status, "body": None, "error": error}
    if isinstance(answer, BaseException):
        raise answer
    body: Any = answer.body.decode("utf-8", "replace")
    kind = (header(answer.headers, b"content-type") or b"").lower().partition(b";")[0].strip()
    if kind == b"application/json" and not answer.cut:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            answer.body.decode()  # what is only passed over is not looked at
            body = msgspec.json.decode(answer.body, type=msgspec.Raw)
    return {"worker": worker.name, "status": answer.status, "body": body, "cut": answer.cut}
