"""Writing past the transport's queue: what the kernel does not take, and every error, is the transport's."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from app.http.inplace import direct_write
from tests.support.raw import until

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # its subject is no loop's

BIG = os.urandom(1 << 20) * 8


class Ends(asyncio.Protocol):
    lost = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        theirs.settimeout(10)
        yield ours, theirs


async def made(ours: socket.socket) -> tuple[Any, Ends]:
    ours.setblocking(False)
    transport, protocol = await asyncio.get_running_loop().create_connection(Ends, sock=ours)
    return transport, protocol


def received(theirs: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size and (piece := theirs.recv(1 << 20)):
        got += piece
    return bytes(got)


async def test_small_pieces_are_sent_before_the_call_returns(pair: tuple[socket.socket, socket.socket]) -> None:
    transport, _ = await made(pair[0])
    write = direct_write(transport)
    for piece in (b"a", b"bc"):
        write(piece)
        assert pair[1].recv(9, socket.MSG_DONTWAIT) == piece
    transport.abort()


async def test_what_the_kernel_does_not_take_follows_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    transport, _ = await made(pair[0])
    write = direct_write(transport)
    write(BIG)  # in part
    assert 0 < transport.get_write_buffer_size() < len(BIG)
    write(b"after")  # behind what waits
    everything = await asyncio.to_thread(received, pair[1], len(BIG) + 5)
    assert everything == BIG + b"after"
    write(b"again")
    assert await asyncio.to_thread(received, pair[1], 5) == b"again"
    transport.abort()


async def test_full_socket_takes_nothing_and_loses_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    transport, _ = await made(pair[0])
    sent = 0
    while True:
        try:
            sent += os.write(
                pair[0].fileno() if pair[0].fileno() >= 0 else transport.get_extra_info("socket").fileno(), BIG
            )
        except BlockingIOError:
            break
    write = direct_write(transport)
    write(b"the end")
    assert transport.get_write_buffer_size() == 7
    assert (await asyncio.to_thread(received, pair[1], sent + 7)).endswith(b"the end")
    transport.abort()


async def test_other_side_that_is_gone_is_told_by_the_transport(pair: tuple[socket.socket, socket.socket]) -> None:
    transport, protocol = await made(pair[0])
    write = direct_write(transport)
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    pair[1].close()
    for _ in range(3):
        write(b"x")  # EPIPE or ECONNRESET, which is nobody's fault here
    await until(lambda: protocol.lost)


@pytest.mark.parametrize("ending", ["close", "abort"])
async def test_nothing_is_written_through_a_number_that_may_be_anothers(
    pair: tuple[socket.socket, socket.socket], ending: str
) -> None:
    transport, protocol = await made(pair[0])
    write = direct_write(transport)
    getattr(transport, ending)()
    write(b"late")
    await until(lambda: protocol.lost)
    read, other = os.pipe()  # takes the number that the socket had, or a lower one
    taken = [os.dup(other) for _ in range(8)]
    write(b"late")
    for number in (*taken, other):
        os.close(number)
    assert os.read(read, 9) == b""
    os.close(read)


async def test_tls_is_left_to_the_transport() -> None:
    class Tls:
        def get_extra_info(self, name: str) -> object:
            return object()

        def write(self, data: bytes) -> None: ...

    transport: Any = Tls()
    assert direct_write(transport) == transport.write
