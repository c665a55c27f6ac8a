"""One request to one worker beside the turns: its whole answer, bounded in time and size, whatever the worker does."""

from __future__ import annotations

import asyncio
import ssl

import httpx
import msgspec

from app.errors import TurnError
from app.fleet.workers import Tls, Worker
from app.http.headers import Header


class Asked(msgspec.Struct, frozen=True):
    """What is sent; `target` with its query."""

    target: bytes
    headers: list[Header]
    method: str = "GET"
    body: bytes = b""


class Answered(msgspec.Struct, frozen=True):
    """What came; header names lower-case. `cut`: the body was longer than was to be read."""

    status: int
    headers: list[Header]
    body: bytes
    cut: bool = False


_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


def asking_client(tls: Tls) -> httpx.AsyncClient:
    """For `ask`. The environment's proxies are for the internet; workers are reached directly, as turns are."""
    trusts_nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx.AsyncClient(
        trust_env=False, verify=trusts_nobody, timeout=None, limits=_LIMITS, mounts={"https://": _Https(tls)}
    )


class _Https(httpx.AsyncBaseTransport):
    """To https workers, of which there may be none."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._made: httpx.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._made is None:
            self._made = httpx.AsyncHTTPTransport(verify=self._tls(), limits=_LIMITS)
        return await self._made.handle_async_request(request)

    async def aclose(self) -> None:
        if self._made is not None:
            await self._made.aclose()


async def ask(client: httpx.AsyncClient, worker: Worker, asked: Asked, *, seconds: float, size: int) -> Answered:
    """The whole answer within `seconds`, or its first `size` bytes. Raises TurnError."""
    url = httpx.URL(worker.url).copy_with(raw_path=worker.base_path + asked.target)
    headers = [(b"accept-encoding", b"identity"), *asked.headers]
    try:
        async with (
            asyncio.timeout(seconds),
            client.stream(asked.method, url, headers=headers, content=asked.body or None) as response,
        ):
            body, cut = bytearray(), False
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > size:
                    cut = True
                    break
    except TimeoutError:
        raise TurnError("worker_timeout", f"the worker did not answer within {seconds:g} s") from None
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise TurnError("worker_unreachable", f"the worker cannot be reached ({error})") from error
    except httpx.RemoteProtocolError as error:
        raise TurnError("worker_bad_response", f"the worker's answer is not HTTP/1.1 ({error})") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TurnError("worker_reset", f"the worker broke the connection ({error})") from error
    lower = [(name.lower(), value) for name, value in response.headers.raw]
    return Answered(response.status_code, lower, bytes(body[:size]), cut)
