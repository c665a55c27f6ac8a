"""Writing to a socket at once. A transport of uvloop only queues what is written and sends it at the end of the loop's
round; for the many small pieces of a relay that detour costs as much as the rest of our own work for one of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

Write = Callable[[bytes], None]


def direct_write(transport: asyncio.Transport) -> Write:
    """A function that does what `transport.write` does: sends what the kernel takes now, and leaves the rest, and every
    error, to the transport. Only for who has the transport: the file descriptor is used while it is not closing."""
    raw = transport.get_extra_info("socket")
    if raw is None or transport.get_extra_info("sslcontext") is not None:
        return transport.write
    fd = raw.fileno()
    waiting, closing, queue, send = transport.get_write_buffer_size, transport.is_closing, transport.write, os.write

    def write(data: bytes) -> None:
        if closing():
            return  # its number may be another socket's by now
        if waiting():
            queue(data)
            return
        try:
            sent = send(fd, data)
        except OSError:  # it takes nothing now, or the other side is gone
            queue(data)
            return
        if sent < len(data):
            queue(memoryview(data)[sent:])

    return write
