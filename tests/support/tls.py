"""Workers and clients that speak TLS, with the same scripts as others, and a router that clients reach by it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.raw import LIMIT, Client, End, Live, Peer, Script, Worker

_RECORD = 16384


@dataclass(frozen=True)
class Contexts:
    server: ssl.SSLContext
    """Of 127.0.0.1 and of worker.test."""
    client: ssl.SSLContext
    """Trusts it, as the router's own for workers does."""
    ca: Path
    """What it trusts; the server's own certificate."""
    key: Path


def contexts(folder: Path, name: str = "worker") -> Contexts:
    """A certificate that nobody has used, and who believes it."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    names = "subjectAltName=IP:127.0.0.1,DNS:worker.test"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=worker", "-days", "2", "-addext", names]
    subprocess.run(["openssl", "req", "-x509", *kind, *files], check=True, capture_output=True, timeout=60)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(cert, key)
    client = ssl.create_default_context(cafile=str(cert))
    client.options |= ssl.OP_NO_RENEGOTIATION
    return Contexts(server, client, cert, key)


class _Secure(End):
    """An end whose bytes travel encrypted. What is written to `raw` is not."""

    def _wrap(self, context: ssl.SSLContext, server_name: str | None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = server_name is None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=ours, server_hostname=server_name)
        self.seen = bytearray()
        """All that has come, as it came."""

    @property
    def protocol(self) -> str | None:
        """That was agreed on (ALPN)."""
        return self._tls.selected_alpn_protocol()

    @property
    def certificate(self) -> bytes | None:
        """The other side's."""
        return self._tls.getpeercert(True)

    async def shake_hands(self) -> None:
        """Raises ConnectionError."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._came(LIMIT):
                    raise ConnectionError("ended within the handshake") from None
            except ssl.SSLError as error:  # also: we do not believe its certificate
                raise ConnectionError("the handshake was broken off") from error
            else:
                await self._flush()
                return

    async def send(self, *pieces: bytes, pause: float = 0.001) -> None:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[self._tls.write(left) :]
        await self._flush()

    async def more(self, limit: float | None = LIMIT) -> bool:
        before = len(self.buffer)
        came = await self._came(limit)
        while True:
            try:
                data = self._tls.read(_RECORD)
            except (ssl.SSLWantReadError, ssl.SSLEOFError):
                return came or len(self.buffer) > before
            except ssl.SSLZeroReturnError:
                data = b""
            except ssl.SSLError as error:
                raise ConnectionError("the router has broken it off") from error
            if not data:
                self.ended = "closed"
                return len(self.buffer) > before
            self.buffer += data

    async def say_the_end(self) -> None:
        """Of TLS, which goes before that of the connection."""
        with contextlib.suppress(ssl.SSLError):  # the other side has not said its own
            self._tls.unwrap()
        await self._flush()

    async def _came(self, limit: float | None) -> bool:
        known = bytes(self.buffer)
        self.buffer.clear()
        came = await super().more(limit)
        self.seen += self.buffer
        self._incoming.write(bytes(self.buffer))
        if self.ended == "closed":
            self._incoming.write_eof()  # what is read then says whether it was the end of TLS too
            self.ended = "cut"
        self.buffer[:] = known
        return came

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await super().send(self._outgoing.read())


class TlsPeer(_Secure, Peer):
    """The worker's end."""

    def __init__(self, peer: Peer, context: ssl.SSLContext) -> None:
        super().__init__(peer.raw, peer.worker, peer.number)
        self._wrap(context, None)


class TlsClient(_Secure, Client):
    """The client's end. `ended` is "cut" where the connection ended before TLS did."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(raw)
        self._wrap(context, "127.0.0.1")


class TlsLive(Live):
    """A router that clients reach by TLS."""

    def __init__(self, tls: Contexts, **settings: Any) -> None:
        super().__init__(tls_cert=tls.ca, tls_key=tls.key, **settings)
        self._tls = tls

    async def connect(self, receive_buffer: int = 0) -> TlsClient:
        raw = await super().connect(receive_buffer)
        client = TlsClient(raw.raw, self._tls.client)
        await client.shake_hands()
        return client


class TlsWorker(Worker):
    """As a worker without TLS, whose scripts get a `TlsPeer`."""

    def __init__(self, context: ssl.SSLContext, *scripts: Script) -> None:
        def over_tls(script: Script) -> Script:
            async def played(peer: Peer) -> None:
                secure = TlsPeer(peer, context)
                await secure.shake_hands()
                await script(secure)

            return played

        super().__init__(*map(over_tls, scripts))

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"
