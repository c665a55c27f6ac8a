"""An etcd whose watch stream says exactly what a test scripts, over real gRPC.

It exists for what a real etcd says rarely or only after minutes: a stream that ends cleanly, a watch cancelled in
mid-stream, history compacted under a slow watcher, a member that has gone deaf.
"""

from __future__ import annotations

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
