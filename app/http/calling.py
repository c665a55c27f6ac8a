"""One request and its whole answer over a connection of a pool: for what is said beside the turns and often. It costs a
tenth of what a general client does, and no task."""

from __future__ import annotations

import asyncio

from app.http.inplace import Driven, Wake
from app.http.response import Expected
from app.http.worker import AttemptFailed, AttemptTimeout, BadResponse, Pool, StaleConnection, WorkerConnection


class Whole:
    """Takes an answer's body until it is complete (`Sink`)."""

    def __init__(self, most: int) -> None:
        """`most`: bytes that it may have."""
        self._most, self._size = most, 0
        self._pieces: list[bytes] = []
        self.complete = Wake()

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    def on_data(self, data: bytes, end: bool) -> None:
        self._size += len(data)
        if self._size > self._most:
            self.complete.fail(BadResponse(f"the answer is longer than {self._most} bytes"))
            return
        self._pieces.append(data)
        if end:
            self.complete.set()

    def on_chunk(self, frame: bytes, start: int) -> None:
        self.on_data(frame[start:-2], False)

    def on_failure(self, failure: AttemptFailed) -> None:
        self.complete.fail(failure)


async def call(pool: Pool, request: bytes, *, seconds: float, most: int) -> tuple[int, bytes]:
    """Status and body of the answer to `request`, head and all, which may be sent twice: a connection that was closed
    while it was idle is replaced. Raises AttemptFailed, also when it is not complete within `seconds` or has more than
    `most` bytes."""
    try:
        async with asyncio.timeout(seconds):
            connection = pool.take()
            if connection is not None:
                try:
                    return await _call(connection, request, most)
                except StaleConnection:
                    pass
            return await _call(await pool.connect(), request, most)
    except TimeoutError:
        raise AttemptTimeout(f"no answer within {seconds:g} s") from None


async def _call(connection: WorkerConnection, request: bytes, most: int) -> tuple[int, bytes]:
    answered: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    async def run() -> tuple[int, bytes]:
        await connection.send(request, b"", expected=Expected.ANSWER)
        whole = Whole(most)
        connection.relay(whole)
        await whole.complete
        return connection.response.status, whole.body

    def returned(answer: tuple[int, bytes] | None) -> None:
        if answer is not None and not answered.done():
            answered.set_result(answer)

    def failed(failure: Exception) -> None:
        if not answered.done():
            answered.set_exception(failure)

    driven = Driven(returned, failed)
    driven.start(run())
    try:
        return await answered
    finally:
        driven.close()
        connection.release()
