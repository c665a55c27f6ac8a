"""Creates that come at the same time go to etcd together.

A gRPC call costs several times the CPU of its create. So what is to be created while others are under way goes
together, as nested transactions of one: each wins or loses by itself. One alone goes as it is. A call without an answer
for so long that it is asked again (`Cluster.attempt_s`) holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from aetcd import rpc

from backends.base import StoreError
from backends.etcd.cluster import Cluster
from backends.etcd.faults import Refused, failure

CREATES_IN_FLIGHT = 2
"""Calls that create claims. What comes while so many are under way waits until one has ended or is late, and goes
together."""
MAX_BATCH = 64
"""Creates in one transaction; etcd counts each as one operation, and takes 128 unless --max-txn-ops says otherwise."""

_log = logging.getLogger("coatcheck.store")


@dataclass(eq=False, slots=True)
class _Create:
    """A create that waits to be sent, or for its answer."""

    name: bytes
    lease: int
    request: Any
    until: float
    answer: asyncio.Future[tuple[int, Any] | StoreError | None]
    """What `create` returns, or raises; None: its batch was refused, and alone it may succeed."""
    sent: bool = False

    def give(self, answer: tuple[int, Any] | StoreError | None) -> None:
        if not self.answer.done():  # as it is when the caller was cancelled, or told that it is too late
            self.answer.set_result(answer)

    def expire(self) -> None:
        self.give(failure(self.sent, "no answer in time"))


class Batches:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.together = True
        """Until etcd refuses nested transactions."""
        self._calls: dict[object, float] = {}
        """Those under way that create, or are about to: since when."""
        self._overtaking: asyncio.TimerHandle | None = None
        """Set while some wait for calls that may be late by then."""
        self._waiting: list[_Create] = []
        self._senders: set[asyncio.Task[None]] = set()

    async def create(self, name: bytes, lease: int, request: Any, until: float) -> tuple[int, Any]:
        """etcd's revision and its answer to the request, a transaction that creates the key `name` with `lease`, and
        has one operation to do, whether it wins or loses. Raises what `Cluster.call` does."""
        together = self.together and self._busy() > 0
        if together:
            loop = asyncio.get_running_loop()
            create = _Create(name, lease, request, until, loop.create_future())
            self._waiting.append(create)
            self._send_waiting()
            timer = loop.call_later(until - time.monotonic(), create.expire)
            try:
                answer = await create.answer
            finally:
                timer.cancel()
            if isinstance(answer, tuple):
                return answer
            if answer is not None:
                # An exception of its own for each caller: they raise it at the same time.
                error = type(answer)(*answer.args)
                error.others_answered = answer.others_answered
                raise error from answer
        call = object()
        self._calls[call] = time.monotonic()
        try:
            alone = await self._cluster.call("txn", request, until, write=True)
        finally:
            del self._calls[call]
            self._send_waiting()
        if together and self.together:
            self.together = False
            _log.warning("etcd, or a proxy before it, refuses nested transactions: each claim is made by its own call")
        return alone.header.revision, alone

    async def aclose(self) -> None:
        """After the cluster: what is under way ends with it."""
        if self._overtaking is not None:
            self._overtaking.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)

    def _busy(self) -> int:
        """Calls under way that are not late."""
        late = time.monotonic() - self._cluster.attempt_s
        return sum(began > late for began in self._calls.values())

    def _send_waiting(self) -> None:
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        if self._busy() < CREATES_IN_FLIGHT:
            # It begins in the loop's next turn, and takes along what else comes in this one.
            call = object()
            self._calls[call] = time.monotonic()
            sender = loop.create_task(self._send_batches(call))
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        elif self._overtaking is None:
            self._overtaking = loop.call_later(self._cluster.attempt_s / 8, self._overtake)

    def _overtake(self) -> None:
        self._overtaking = None
        self._send_waiting()

    async def _send_batches(self, call: object) -> None:
        """Runs in a task of its own: the cancellation of a caller concerns no other."""
        try:
            while batch := self._next_batch():
                self._calls[call] = time.monotonic()
                await self._send(batch)
        finally:
            del self._calls[call]

    async def _send(self, batch: list[_Create]) -> None:
        """In one call; gives each its answer."""
        request = batch[0].request
        if len(batch) > 1:
            request = rpc.TxnRequest(
                success=[rpc.RequestOp(request_txn=create.request) for create in batch],
                # Never run. A full etcd 3.4 sees no nested puts, and would take them.
                failure=request.success,
            )
        try:
            answer = await self._cluster.call("txn", request, max(create.until for create in batch), write=True)
        except StoreError as error:
            alone = isinstance(error, Refused) and len(batch) > 1
            for create in batch:
                create.give(None if alone else error)
        else:
            answers = [part.response_txn for part in answer.responses] if len(batch) > 1 else [answer]
            for create, its in zip(batch, answers, strict=True):
                # No response to either of its operations: somebody dropped the nested transaction.
                create.give((answer.header.revision, its) if its.responses else None)

    def _next_batch(self) -> list[_Create]:
        """Who may share a transaction: each key once, as etcd wants it, and one lease: its loss concerns all."""
        batch: dict[bytes, _Create] = {}
        left = []
        lease = 0
        for create in self._waiting:
            if create.answer.done():
                continue
            lease = lease or create.lease
            if len(batch) < MAX_BATCH and create.lease == lease and create.name not in batch:
                batch[create.name] = create
                create.sent = True
            else:
                left.append(create)
        self._waiting = left
        return list(batch.values())
