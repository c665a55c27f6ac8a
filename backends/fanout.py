"""How a store hands events to its subscribers: a bounded mailbox each, and a Reset in place of what did not fit."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from backends.base import Reset, StoreError, StoreUnavailable

E = TypeVar("E")

MAILBOX_SIZE = 4096
"""Events that a subscriber may lag behind."""


class Mailbox(Generic[E]):
    """The events of one subscriber, in order. Iterate it; belongs to one event loop.

    `subject`: an event takes the place of a waiting one with the same subject. By `id`, none has the same."""

    def __init__(self, size: int, subject: Callable[[E], Hashable] = id) -> None:
        self._size = size
        self._subject = subject
        self._events: OrderedDict[Hashable, E | Reset] = OrderedDict()
        self._news = asyncio.Event()
        self._ended = False
        self._error: StoreError | None = None

    def put(self, event: E | Reset) -> None:
        if self._ended:
            return
        subject = None if isinstance(event, Reset) else self._subject(event)
        if subject is None or (len(self._events) >= self._size and subject not in self._events):
            # A Reset says all that was said before it, and more, but for this.
            rewound = any(isinstance(said, Reset) and said.rewound for said in (*self._events.values(), event))
            self._events.clear()
            subject, event = None, Reset(rewound=rewound)
        self._events[subject] = event
        self._news.set()

    def end(self, error: StoreError | None = None) -> None:
        """After what is in it, the iteration ends, or raises `error`."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._news.set()

    def __aiter__(self) -> Mailbox[E]:
        return self

    async def __anext__(self) -> E | Reset:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._events.popitem(last=False)[1]


class FanOut(Generic[E]):
    """The mailboxes of all subscribers."""

    def __init__(self, mailbox_size: int = MAILBOX_SIZE, subject: Callable[[E], Hashable] = id) -> None:
        self._mailbox_size = mailbox_size
        self._subject = subject
        self._mailboxes: set[Mailbox[E]] = set()

    def __len__(self) -> int:
        return len(self._mailboxes)

    def join(self) -> Mailbox[E]:
        mailbox = Mailbox(self._mailbox_size, self._subject)
        self._mailboxes.add(mailbox)
        return mailbox

    def leave(self, mailbox: Mailbox[E]) -> None:
        self._mailboxes.discard(mailbox)

    def publish(self, event: E | Reset) -> None:
        for mailbox in self._mailboxes:
            mailbox.put(event)

    def end(self, error: str | None = None) -> None:
        """Ends every subscription; with an error, each subscriber is raised its own StoreUnavailable."""
        for mailbox in self._mailboxes:
            mailbox.end(None if error is None else StoreUnavailable(error))
        self._mailboxes.clear()
