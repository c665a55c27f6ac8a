"""One try of a turn at one target (`Attempt`), and the law of trying again (`after`).

A request is sent again only when no work can be done twice:

- no connection could be made: surely nothing ran; the worker is lost, and the turn goes on at another one. Not so where
  its name could not be looked up, which says nothing of the worker: there only a turn goes on that is free to, and
  others are to come again;
- the worker answers 503 before any byte of a body, and the turn is free to go elsewhere: it has no session, or the
  claim is its own, and the client has named no worker. Once;
- a reused connection was closed already when we wrote into it, by what the worker's kernel acknowledged: the request
  surely did not run; once more at the same worker, on a fresh connection;
- the connection broke before any byte of an answer, and the worker, asked at once, refuses new ones: its process is
  gone, and what it had begun is gone with it; the worker is lost, and the turn goes on at another one. Once: a request
  of which two workers have died is not taken to a third, and its client is told not to send it again either.

A request whose body goes through as it comes, or that asks for another protocol, goes on a fresh connection and is sent
once. Nothing else is tried again: the worker may be at work on it. (Turns in two phases can begin anew where a worker
is silent: see `phases`.)
"""

from __future__ import annotations

import asyncio
import enum

import msgspec

from app.errors import TurnError
from app.fleet.capacity import Slot
from app.fleet.health import Health, Probe, State
from app.fleet.workers import Target, Worker
from app.http.inplace import Driven
from app.http.worker import (
    AttemptFailed,
    AttemptTimeout,
    BadResponse,
    ConnectFailed,
    ConnectionBroken,
    ConnectRefused,
    ConnectReset,
    LocalLimit,
    NameUnknown,
    StaleConnection,
    WorkerConnection,
)
from app.metrics import Metrics
from app.turn.presence import Presence, nothing
from app.turn.request import Request

_DYING_PAUSES = (0.0, 0.02, 0.03, 0.05, 0.1, 0.2)
"""Seconds before each look at whether a worker that broke a connection is still there: a process that is killed loses
its connections before the socket that it listens on, and the kernel takes new ones in between. Whoever lives keeps a
connection that says nothing; whoever dies resets it."""
_DYING_MORE = (0.25,) * 6
"""As many more where it looks like dying: it has dropped such a connection, or failed other turns as well and none has
gone well since. A busy machine may give it no time to end."""


_BUSY = frozenset({429, 503})
_NOT_ITS_BUSINESS = frozenset({501, 505})
"""What the request asks for, the worker does not have: no illness."""


class Next(enum.Enum):
    """What follows a failed attempt."""

    AGAIN = "stale_connection"
    """At the same worker, on a fresh connection. The values are the reasons that are counted."""
    ELSEWHERE = "worker_unreachable"
    """The worker is lost."""
    ELSEWHERE_IF_GONE = "worker_died"
    """The worker is lost if it refuses connections now; else the turn has failed."""
    ELSEWHERE_IF_ANY = "worker_busy"
    """At another worker if there is one; else the answer stands."""
    ANEW = "handover_lost"
    """With its prompt computed anew (`phases`): its decode worker could not go on with what was computed."""
    FAIL = ""


class Sent(msgspec.Struct, frozen=True):
    """What is known of a request when an attempt has failed."""

    once: bool = False
    """It cannot be sent a second time: its body went through as it came, or it asked for another protocol."""
    first_byte: bool = False
    """Of an answer something has come."""
    killed: bool = False
    """A worker has died of it before."""
    free: bool = False
    """It has no session, or the claim is its own, and nobody has named a worker."""


def after(failure: AttemptFailed, sent: Sent) -> Next:
    """The law of trying again."""
    if isinstance(failure, NameUnknown) and not sent.free:
        return Next.FAIL
    if isinstance(failure, ConnectFailed):
        return Next.ELSEWHERE
    if isinstance(failure, StaleConnection):
        return Next.AGAIN
    if isinstance(failure, ConnectionBroken) and not (sent.once or sent.first_byte or sent.killed):
        return Next.ELSEWHERE_IF_GONE
    return Next.FAIL


def after_busy(sent: Sent) -> Next:
    """The law for an answer of 503, of which nothing has been passed on: the worker has not taken the request."""
    return Next.ELSEWHERE_IF_ANY if sent.free and not sent.once else Next.FAIL


def error_of(failure: AttemptFailed, *, killed: bool = False) -> TurnError:
    """What the client is told of an attempt that failed before a response began and is not made again. `killed`: a
    worker has died of the request before."""
    if killed and isinstance(failure, ConnectionBroken):
        return TurnError("workers_died", f"a worker died of this request, and a second one broke off: {failure}")
    if isinstance(failure, NameUnknown):
        return TurnError("worker_unreachable", str(failure))
    if isinstance(failure, LocalLimit):
        return TurnError("overloaded", str(failure))
    if isinstance(failure, AttemptTimeout):
        return TurnError("worker_timeout", str(failure))
    if isinstance(failure, BadResponse):
        return TurnError("worker_bad_response", str(failure))
    return TurnError("worker_reset", str(failure))


def judge(health: Health, status: int) -> None:
    """What an answer's status says of its worker. Called for every one."""
    if status < 400:
        health.good += 1
        if health.watchful:
            health.served_well()
    elif status in _BUSY:
        health.busy(f"status {status}")
    elif status >= 500 and status not in _NOT_ITS_BUSINESS:
        health.failed(f"status {status}")


def blame(health: Health, failure: AttemptFailed) -> None:
    """What a failure before a response began says of its worker."""
    if isinstance(failure, ConnectionBroken | AttemptTimeout | BadResponse):
        health.failed(str(failure))
    elif isinstance(failure, ConnectFailed):  # `connect` has said what that makes of it
        health.errors.count()


class Attempt:
    """One try. It holds the target's slot, and its `connection` once that is set, until `end`."""

    __slots__ = ("_loop", "_slot", "_upload", "connection", "target", "upload_fault")

    def __init__(self, target: Target, loop: asyncio.AbstractEventLoop, slot: Slot | None) -> None:
        """`slot`: the one at `target` that was taken for it already, where they are limited."""
        self.target, self._loop, self._slot = target, loop, slot
        self.connection: WorkerConnection | None = None
        self._upload: Driven | None = None
        self.upload_fault: Exception | None = None
        """Why it was given up, where that is no failure of the worker's: the rest of the request could not be sent, or
        what it waits for will not come."""
        if slot is None:
            target.in_flight += 1
            target.spent -= loop.time()

    def end(self) -> None:
        """Give back what it holds. To be called once, whatever happened."""
        connection = self.connection
        if connection is not None:
            connection.release()
        if self._upload is not None:
            self._upload.close()
        if self._slot is None:
            self.target.in_flight -= 1
            self.target.spent += self._loop.time()
        else:
            self._slot.give_back(cut=connection is not None and not connection.response.complete)

    @property
    def came(self) -> bool:
        """Something of an answer has come."""
        return self.connection is not None and self.connection.first_byte

    def send_rest(self, request: Request) -> None:
        """Begin to pass on what the client goes on to send, while the worker may already answer."""
        assert self.connection is not None
        self._upload = Driven(nothing, self._upload_failed)
        self._upload.start(request.send_rest(self.connection))

    def _upload_failed(self, fault: Exception) -> None:
        self.upload_fault = fault
        if self.connection is not None:  # not in place: it may end the turn, and with it what calls us
            self._loop.call_soon(self.connection.fail, ConnectionBroken("the request was not completed"))


async def connect(worker: Worker, presence: Presence, metrics: Metrics) -> WorkerConnection:
    """A new connection. Raises ConnectFailed, LocalLimit or ClientDisconnected."""
    try:
        connection = await presence.unless_gone(worker.pool.connect(), WorkerConnection.close)
    except ConnectFailed as failure:
        metrics.connects.inc(worker.name, "failed")
        if isinstance(failure, NameUnknown):
            worker.health.nameless(str(failure))
        else:
            worker.health.unreachable(f"no connection: {failure}", refused=isinstance(failure, ConnectRefused))
        raise
    metrics.connects.inc(worker.name, "ok")
    worker.health.connected()
    return connection


def is_silent(worker: Worker) -> bool:
    """Whether a worker that has not answered a turn in time is no slow one: it is not up, or does not answer its
    probes either."""
    health = worker.health
    return health.state is not State.UP or health.probe is Probe.BAD or health.probe is Probe.UNREACHABLE


async def is_gone(worker: Worker, presence: Presence, metrics: Metrics) -> bool:
    """Whether nobody listens at the worker's address, or will in a moment. Raises ClientDisconnected."""
    connection: WorkerConnection | None = None
    dying = False
    try:
        for pause in (*_DYING_PAUSES, *_DYING_MORE):
            if pause == _DYING_MORE[0] and not (dying or worker.health.failed_lately(worker.health.clock()) > 1):
                break
            if pause:
                await presence.unless_gone(asyncio.sleep(pause))
            if connection is not None:
                dying = dying or not connection.connected
                # Also one that still stands: who has died within its handshake may never have told us.
                connection.close()
                connection = None
            try:
                connection = await connect(worker, presence, metrics)
            except ConnectRefused:
                return True
            except ConnectReset:
                dying = True
            except AttemptFailed:
                return False  # a path that is cut says nothing of the worker behind it
        return False
    finally:
        if connection is not None:
            connection.close()
