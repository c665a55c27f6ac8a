"""An etcd whose watch stream says exactly what a test scripts, over real gRPC; and a proxy before a real one that holds
calls, forwards them late, and delays what watches are told.

The scripted one exists for what a real etcd says rarely or only after minutes: a stream that ends cleanly, a watch
cancelled in mid-stream, history compacted under a slow watcher, a member that has gone deaf. The proxy exists for
single calls that hang while others are answered, and for requests that are executed long after their callers have gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import grpc
from aetcd import rpc
from aetcd.rpc import rpc_pb2_grpc

Script = Callable[[int, AsyncIterator[Any]], AsyncIterator[Any]]
"""Given the number of the watch (0, 1, ...) and the client's requests, yields WatchResponses."""


class ScriptedEtcd(rpc_pb2_grpc.WatchServicer, rpc_pb2_grpc.KVServicer):  # type: ignore[misc]
    def __init__(self, script: Script) -> None:
        self._script = script
        self.watches = 0
        self.metadata: list[dict[str, str]] = []
        """Of each watch."""
        self.on_range: Callable[[], Awaitable[None]] | None = None
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        rpc_pb2_grpc.add_WatchServicer_to_server(self, self._server)
        rpc_pb2_grpc.add_KVServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        await self._server.stop(None)

    def url(self, prefix: str = "coatcheck") -> str:
        return f"etcd://127.0.0.1:{self.port}/{prefix}"

    async def Watch(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        number, self.watches = self.watches, self.watches + 1
        self.metadata.append(dict(context.invocation_metadata()))
        async for message in self._script(number, requests):
            yield message

    async def Range(self, request: Any, context: Any) -> Any:
        if self.on_range is not None:
            await self.on_range()
        return rpc.RangeResponse()


class HoldingProxy(grpc.GenericRpcHandler):
    """Passes gRPC calls to the etcd at `target` as they are, unless it is told to hold them."""

    def __init__(self, target: str) -> None:
        self.port = 0
        self.hold: Callable[[str, bytes], bool] = lambda method, request: False
        """Given the method's name (`Txn`) and the request: whether it is held and not answered."""
        self.held: list[tuple[str, bytes]] = []
        self.calls = 0
        self.delay = 0.0
        """Seconds by which other calls are answered later."""
        self.watch_delay = 0.0
        """Seconds by which watches are told later."""
        self._target = target
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._target)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        await self._server.stop(None)
        await self._channel.close()

    def url(self, prefix: str = "coatcheck") -> str:
        return f"etcd://127.0.0.1:{self.port}/{prefix}"

    async def release(self) -> None:
        """Let etcd execute what is held, whoever still waits for it."""
        held, self.held = self.held, []
        for method, request in held:
            await self._forward(method, request)

    async def _forward(self, method: str, request: bytes, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
        call: Any = self._channel.unary_unary(method)
        return await call(request, timeout=5, metadata=metadata)

    def service(self, details: Any) -> Any:
        if details.method.endswith("/Watch"):
            return grpc.stream_stream_rpc_method_handler(self._watch(details.method))
        return grpc.unary_unary_rpc_method_handler(self._call(details.method))

    def _call(self, method: str) -> Any:
        name = method.rpartition("/")[2]

        async def handle(request: bytes, context: Any) -> Any:
            self.calls += 1
            if self.hold(name, request):
                self.held.append((method, request))
                await asyncio.Event().wait()
            await asyncio.sleep(self.delay)
            return await self._forward(method, request, _ours(context))

        return handle

    def _watch(self, method: str) -> Any:
        async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            call: Any = self._channel.stream_stream(method)
            async for message in call(requests, metadata=_ours(context)):
                await asyncio.sleep(self.watch_delay)
                yield message

        return handle


def _ours(context: Any) -> tuple[tuple[str, str], ...]:
    """The metadata that a client of etcd sets; the rest is gRPC's."""
    return tuple((key, value) for key, value in context.invocation_metadata() if key in ("hasleader", "token"))
