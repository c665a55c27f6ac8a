"""The hand-over of a prompt's blocks from the worker that computed them to the one that goes on, as vLLM's NIXL
connector does it (`vllm/distributed/kv_transfer/kv_connector/v1/nixl/`, read at 0.33).

A request that asks for remote decode ends with its blocks *staged*, and its answer says in `kv_transfer_params` where
they are. They are kept until the request that names them has fetched them, or the lease is over. That one is sent to
another worker with these very parameters: it fetches the blocks beside HTTP, here over a connection to the *side
channel*, which takes as long as their bytes do, and goes on when its client leaves. Parameters that lack a field are
passed over, and the prompt is computed anew; blocks that cannot be fetched fail the request, or (`recompute`) have it
computed anew, as vLLM's `kv_load_failure_policy` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from mocker.settings import KvTransfer

BLOCK_SIZE = 16
"""Tokens, vLLM's default."""
_NEEDED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_ANSWER_WITHIN = 5.0
"""Seconds."""


class NotFetched(Exception):
    """The blocks are not there, or their worker is not."""


@dataclass(slots=True)
class Staged:
    """The blocks of one request."""

    blocks: list[int]
    tokens: int
    lease: asyncio.TimerHandle
    fetching: bool = False


class _Fetch(msgspec.Struct):
    """What the side channel is asked."""

    engine_id: str
    request_id: str
    block_ids: list[list[int]]


class Bytes(msgspec.Struct):
    """And what it answers; `size`: -1 when the blocks are not there."""

    size: int


encode = msgspec.json.Encoder().encode
_decode_fetch = msgspec.json.Decoder(_Fetch).decode
decode_bytes = msgspec.json.Decoder(Bytes).decode


def asks_for_decode(params: dict[str, Any] | None) -> bool:
    return bool(params and params.get("do_remote_decode"))


def names_blocks(params: dict[str, Any] | None) -> bool:
    """Whether blocks are to be fetched: it asks for that, and says all that is needed."""
    return bool(params and params.get("do_remote_prefill") and all(params.get(name) is not None for name in _NEEDED))


class Handover:
    """Both sides of one worker."""

    def __init__(self, settings: KvTransfer, chance: random.Random) -> None:
        """Binds the side channel. Raises OSError."""
        self._settings, self._chance = settings, chance
        self._socket = socket.create_server((settings.host, settings.port), backlog=512)
        self.host, self.port = self._socket.getsockname()[:2]
        self._numbers = itertools.count(1)
        self._engine = self._new_engine()
        self._tasks: set[asyncio.Task[None]] = set()
        self.staged: dict[str, Staged] = {}
        """By request."""
        self.fetched = self.expired = 0
        """Requests whose blocks were fetched from here, and whose lease was over."""

    def _new_engine(self) -> str:
        return f"{self._chance.getrandbits(128):032x}"

    @property
    def blocks(self) -> int:
        """That are staged."""
        return sum(len(each.blocks) for each in self.staged.values())

    # -- where the prompt is computed

    def stage(self, request_id: str, tokens: int) -> dict[str, Any]:
        """The prompt's blocks stay; returns what leads to them."""
        ids = list(itertools.islice(self._numbers, max(1, -(-tokens // BLOCK_SIZE))))
        name = f"{request_id}-{self._chance.getrandbits(32):08x}"
        lease = asyncio.get_running_loop().call_later(self._settings.lease_s, self._expire, name)
        self.staged[name] = Staged(ids, tokens, lease)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [ids],
            "remote_engine_id": self._engine,
            "remote_request_id": name,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": 0,
            "transfer_mode": "pull",
        }

    def forget(self, params: dict[str, Any]) -> None:
        """What was staged is gone."""
        self._free(params["remote_request_id"])

    def restart(self) -> None:
        """As when the process has crashed."""
        for name in list(self.staged):
            self._free(name)
        self._engine = self._new_engine()

    def _free(self, name: str) -> bool:
        staged = self.staged.pop(name, None)
        if staged is not None:
            staged.lease.cancel()
        return staged is not None

    def _expire(self, name: str) -> None:
        staged = self.staged[name]
        if staged.fetching:  # who fetches keeps it alive
            staged.lease = asyncio.get_running_loop().call_later(self._settings.lease_s, self._expire, name)
            return
        self._free(name)
        self.expired += 1

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer who fetches, in `loop`."""
        self._spawn(self._listen(), loop)

    async def _listen(self) -> None:
        async with await asyncio.start_server(self._hand_out, sock=self._socket) as server:
            await server.serve_forever()

    async def _hand_out(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        staged: Staged | None = None
        try:
            async with asyncio.timeout(_ANSWER_WITHIN):
                wanted = _decode_fetch(await reader.readline())
            staged = self.staged.get(wanted.request_id) if wanted.engine_id == self._engine else None
            if staged is not None and (staged.fetching or wanted.block_ids != [staged.blocks]):
                staged = None
            if staged is None:
                writer.write(encode(Bytes(-1)) + b"\n")
                return
            staged.fetching = True
            writer.write(encode(Bytes(staged.tokens * self._settings.token_bytes)) + b"\n")
            if await reader.readline() and self._free(wanted.request_id):  # it has all
                self.fetched += 1
        except (OSError, ValueError, TimeoutError):
            pass  # whoever that was
        finally:
            if staged is not None:
                staged.fetching = False
            writer.close()

    def close(self) -> None:
        """Also while its loop runs, which must know of it."""
        for task in self._tasks:
            task.cancel()
        if not self._tasks:
            self._socket.close()

    # -- where the answer is said

    def fetch(self, params: dict[str, Any]) -> asyncio.Task[int]:
        """How many blocks were fetched; to be awaited shielded, for it goes on without the client. Raises
        NotFetched."""
        task = asyncio.get_running_loop().create_task(self._fetch(params))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _fetch(self, params: dict[str, Any]) -> int:
        try:
            wanted = msgspec.convert(
                {name.removeprefix("remote_"): params[name] for name in _NEEDED[:3]}, _Fetch, strict=True
            )
            async with asyncio.timeout(_ANSWER_WITHIN):
                reader, writer = await asyncio.open_connection(params["remote_host"], params["remote_port"])
        except (OSError, TimeoutError, ValueError, TypeError) as error:
            raise NotFetched(str(error)) from error
        with contextlib.closing(writer):
            try:
                writer.write(encode(wanted) + b"\n")
                async with asyncio.timeout(_ANSWER_WITHIN):
                    size = decode_bytes(await reader.readline()).size
                if size < 0:
                    raise NotFetched("the blocks are not there")
                await asyncio.sleep(size / (self._settings.gb_s * 1e9))
                writer.write(b"done\n")
                await writer.drain()
            except (OSError, TimeoutError, ValueError) as error:
                raise NotFetched(str(error)) from error
        return sum(map(len, wanted.block_ids))

    def _spawn(self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
        task = loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
