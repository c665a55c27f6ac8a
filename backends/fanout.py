"""How a store hands events to its subscribers: a bounded mailbox each, and a Reset in place of what did not fit."""

from __future__ import annotations

import asyncio
from collections import deque

from backends.base import Event, Reset, StoreError, StoreUnavailable

MAILBOX_SIZE = 4096
"""Events that a subscriber may lag behind."""


class Mailbox:
    """The events of one subscriber, in order. Iterate it; belongs to one event loop."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()
        self._ended = False
        self._error: StoreError | None = None

    def put(self, event: Event) -> None:
        if self._ended:
            return
        if isinstance(event, Reset) or len(self._events) >= self._size:
            # A Reset says all that was said before it, and more, but for this.
            rewound = any(isinstance(said, Reset) and said.rewound for said in (*self._events, event))
            self._events.clear()
            event = Reset(rewound=rewound)
        self._events.append(event)
        self._news.set()

    def end(self, error: StoreError | None = None) -> None:
        """After what is in it, the iteration ends, or raises `error`."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._news.set()

    def __aiter__(self) -> Mailbox:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()


class FanOut:
    """The mailboxes of all subscribers."""

    def __init__(self, mailbox_size: int = MAILBOX_SIZE) -> None:
        self._mailbox_size = mailbox_size
        self._mailboxes: set[Mailbox] = set()

    def __len__(self) -> int:
        return len(self._mailboxes)

    def join(self) -> Mailbox:
        mailbox = Mailbox(self._mailbox_size)
        self._mailboxes.add(mailbox)
        return mailbox

    def leave(self, mailbox: Mailbox) -> None:
        self._mailboxes.discard(mailbox)

    def publish(self, event: Event) -> None:
        for mailbox in self._mailboxes:
            mailbox.put(event)

    def end(self, error: str | None = None) -> None:
        """Ends every subscription; with an error, each subscriber is raised its own StoreUnavailable."""
        for mailbox in self._mailboxes:
            mailbox.end(None if error is None else StoreUnavailable(error))
        self._mailboxes.clear()
