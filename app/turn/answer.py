"""What a client is answered: a worker's response as it comes, or something of our own."""

from __future__ import annotations

from app.errors import TurnError, error_event
from app.http import sse
from app.http.exchange import Exchange
from app.http.headers import Header, header
from app.http.inplace import Wake
from app.http.worker import AttemptFailed, AttemptTimeout, WorkerConnection
from app.sessions.spread import Hold
from app.turn import usage as usages
from app.turn.kept import Keeper
from app.turn.presence import Presence


class Answer:
    """The sink of the worker's connection, which pushes into it: no task, no future and no round of the event loop per
    piece. When the client's buffer is full it pauses that connection until the client has caught up.

    Invariant: the turn waits until it `_is_due`, at `_due`, for the end of the body, its failure, or the end being held
    (`_held`), and never for the client: what that has not taken waits in its connection. While `_held` is set, whatever
    comes goes there: nothing overtakes an end that waits for the session's close, nor a beginning that waits for its
    ids to be claimed, which it does while there is a `_keeper`.
    """

    # Defaults in the class: these are set before they are looked at, or seldom looked at.
    ttft = 0.0
    """How long after the turn began the first piece of the body came, in seconds."""
    stalled = False
    _connection: WorkerConnection | None = None
    _binding: Hold | None = None
    _written_end = False
    _held_end = False
    _keeper: Keeper | None = None
    _marker: sse.EndDetector | None = None

    def __init__(self, exchange: Exchange, presence: Presence, began: float) -> None:
        """`began`: when the turn did, by the loop's time."""
        self._exchange, self._presence, self._began = exchange, presence, began
        self.came = False
        """The first piece of the body has come."""
        self.failure: AttemptFailed | None = None
        """The body will not be completed."""
        self._held: list[bytes] | None = None
        self._last = b""
        """What came last of an answer that is no event stream."""
        self._trail: sse.Trail | None = None
        """What went by last of an event stream that is more than one piece."""
        self._is_due = False
        self._due: Wake | None = None
        """None: the turn does not wait, as for an answer that is whole when its head comes."""

    @property
    def waits_for_worker(self) -> bool:
        return not self.stalled and (self._held is None or self._keeper is not None)

    # -- the turn's side

    def relay(self, connection: WorkerConnection, binding: Hold | None, keeper: Keeper | None = None) -> bool:
        """Begin to pass the worker's body on. Returns whether all of it has gone by already; else await `ended`.
        `keeper`: reads the beginning before the client does."""
        self._connection, self._binding = connection, binding
        if keeper is not None:
            self._keeper, self._held = keeper, []
        connection.relay(self)
        if self._written_end:
            return True
        if self._held is None:  # else a head that is a whole answer would be seen before the claim is closed
            self._exchange.flush()
        return False

    async def ended(self) -> None:
        """The body has ended, or its `failure` has come."""
        await self._until_due()
        while self._held is not None:  # again when another turn had joined at `[DONE]` and left before the end
            keeper, self._keeper = self._keeper, None
            if keeper is not None:
                await self._presence.in_any_case(keeper.keep())
            else:
                assert self._binding is not None
                await self._presence.in_any_case(self._binding.close())
            self._is_due = False
            held, self._held = self._held, None
            if keeper is None:
                self._push(b"".join(held), self._held_end)
            elif held:
                self.on_data(b"".join(held), self._held_end)  # which may be an end to be held
            if self.failure is not None:
                self._is_due = True
            await self._until_due()

    async def _until_due(self) -> None:
        if not self._is_due:
            self._due = Wake()
            await self._due
            self._due = None

    def _set_due(self) -> None:
        """The turn goes on, in place."""
        self._is_due = True
        if self._due is not None:
            self._due.set()

    @property
    def usage(self) -> tuple[int, int] | None:
        """Of an answer that is complete: tokens of its prompt, and how many of them its worker's cache had; None: it
        does not say."""
        return usages.tokens(self._last if self._trail is None else self._trail.text)

    @property
    def over(self) -> bool:
        """Whether its API's last event has been written: what follows adds nothing to the answer."""
        return self._trail is not None and self._trail.over

    def end(self) -> None:
        """The answer is `over`, and what should have followed has not come."""
        self._exchange.write(b"", True)

    def say_broken(self, failure: AttemptFailed, request_id: bytes) -> None:
        """The attempt failed after the head. Say so inside an event stream, where that stands between two events, and
        never end the body cleanly: clients take a clean end for a complete answer."""
        stands = self._trail.between_events if self._trail is not None else not self.came and self._is_event_stream
        if stands:
            code = "worker_stalled" if isinstance(failure, AttemptTimeout) else "worker_stream_broken"
            error = TurnError(code, str(failure))
            self._exchange.write(error_event(error, self._exchange.raw_path, request_id), False)

    def say(self, status: int, headers: list[Header], body: bytes, lines: bytes) -> None:
        """Something of our own, whole. As `Exchange.start`."""
        self._exchange.start(status, headers, lines)
        self._exchange.write(body, True)

    # -- called from the client's connection; as the sink's methods they may run the turn in place: the last thing

    def client_took(self) -> None:
        """The client has taken what was written."""
        if self.stalled:
            self.stalled = False
            if self._connection is not None and self.failure is None:
                self._connection.resume()

    def client_left(self) -> None:
        if self._held is None:
            self._set_due()

    # -- the sink: called from the worker's connection

    def on_data(self, data: bytes, end: bool) -> None:
        if not self.came:
            self.came = True
            self.ttft = self._presence.loop.time() - self._began
            if not end and self._is_event_stream:
                self._trail = sse.Trail()
        if self._held is not None:
            self._held.append(data)
            self._held_end = end
            if self._keeper is not None and self._keeper.has_seen(self._held, end):
                self._set_due()
            return
        binding = self._binding
        if binding is not None and binding.holds_end and self._hold(data, end):
            return
        self._push(data, end)

    def on_chunk(self, frame: bytes, start: int) -> None:
        trail, binding = self._trail, self._binding
        if trail is None or self._held is not None or (binding is not None and binding.holds_end):
            self.on_data(frame[start:-2], False)
            return
        if len(frame) > sse.LONG:
            trail.note(frame[start:-2])
        else:
            trail.append(frame)
        if not self._exchange.write_chunk(frame, start):
            self._stall()

    def on_failure(self, failure: AttemptFailed) -> None:
        self.failure = failure
        self._set_due()

    def _hold(self, data: bytes, end: bool) -> bool:
        """Keep back the end of a session's last answer until its claim is closed; clients take either the end of
        the body or their API's last event for it."""
        if self._marker is None:
            self._marker = sse.EndDetector()
        if not end and not self._marker.feed(data):
            return False
        self._held, self._held_end = [data], end
        self._set_due()
        return True

    def _push(self, data: bytes, end: bool) -> None:
        if self._trail is not None:
            self._trail.note(data)
        elif end:
            self._last = self._last[-usages.FAR :] + data if self._last else data
        else:
            self._last = data
        self._written_end = end
        if not self._exchange.write(data, end):
            self._stall()
        elif end:
            self._set_due()

    def _stall(self) -> None:
        """The client is full: read no more from the worker until it has taken what it got."""
        self.stalled = True
        if self._connection is not None:
            self._connection.pause()

    @property
    def _is_event_stream(self) -> bool:
        """Whether it is one that can be looked into, and added to."""
        if self._connection is None:
            return False
        headers = self._connection.response.headers
        return (
            (header(headers, b"content-type") or b"").lower().startswith(b"text/event-stream")
            and header(headers, b"content-length") is None
            and header(headers, b"content-encoding") is None
        )
