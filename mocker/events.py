"""KV events as vLLM publishes them: what blocks a rank has stored and removed, over ZeroMQ.

The format is that of `vllm/distributed/kv_events.py`, and of what vLLM 0.32 sends: a PUB socket sends topic, sequence
number (8 bytes, big endian, from 0 since the process began) and a payload in msgpack, `[time, [event, …], rank]`. Each
event is a map with a `type`; before 0.24 it was an array that begins with it (`old`). A ROUTER socket answers a
sequence number with all batches from there on that are kept, and ends with the number -1, without topic and payload.
What a real one has sent is recorded in `tests/unit/files/vllm_kv_events.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from mocker.cache import TOKEN_BYTES
from mocker.engine.scheduler import Job
from mocker.live import Sequence
from mocker.settings import MockSettings

_KEPT = 10_000
"""Batches, vLLM's default."""
_END = (-1).to_bytes(8, "big", signed=True)
_LIMIT = 100_000
"""Batches that wait for a slow subscriber, vLLM's default; further ones are lost to it."""


class EventPublisher:
    """Publishes what becomes of the blocks of one rank, a batch for each step that changes any."""

    def __init__(
        self, host: str, port: int, replay_port: int | None, *, rank: int, block_size: int, topic: str, old: bool
    ) -> None:
        """Binds at once; port 0: any. Raises OSError."""
        self._context = zmq.Context()
        self._rank = rank
        self._block_size = block_size
        self._topic = topic.encode()
        self._old = old
        self._events: list[Any] = []
        self._number = 0
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self._encode = msgspec.msgpack.Encoder().encode
        self._replay: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        try:
            self._publish = self._bound(zmq.PUB, host, port)
            if replay_port is not None:
                self._replay = self._bound(zmq.ROUTER, host, replay_port)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"KV events at {host}:{port}: {error.strerror}") from error
        self.endpoint = _address(self._publish)
        self.replay_endpoint = None if self._replay is None else _address(self._replay)

    def _bound(self, kind: int, host: str, port: int) -> zmq.Socket[bytes]:
        bound: zmq.Socket[bytes] = self._context.socket(kind)
        bound.set_hwm(_LIMIT)
        bound.setsockopt(zmq.IPV6, ":" in host)
        bound.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
        return bound

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer who asks for what was missed, from now on."""
        if self._replay is not None and self._loop is None:
            self._loop = loop
            loop.add_reader(self._replay.fileno(), self._answer)
            self._answer()

    # --- as a listener

    def stored(self, owner: Job, start: int, end: int) -> None:
        sequence: Sequence = owner.owner
        chain = sequence.job.chain
        width = TOKEN_BYTES * self._block_size
        text = sequence.text[start * width : end * width]
        tokens = [int.from_bytes(text[at : at + TOKEN_BYTES], "little") for at in range(0, len(text), TOKEN_BYTES)]
        hashes = [chain[at] for at in range(start, end)]
        parent = chain[start - 1] if start else None
        adapter = None if sequence.adapter is None else sequence.model
        if self._old:
            self._events.append(["BlockStored", hashes, parent, tokens, self._block_size, sequence.adapter, "GPU"])
            return
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": self._block_size,
                "lora_id": sequence.adapter,
                "medium": "GPU",
                "lora_name": adapter,
                "extra_keys": [_extra_keys(adapter, "" if at else sequence.salt) for at in range(start, end)],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )

    def removed(self, hashes: list[int]) -> None:
        for each in hashes:  # vLLM tells of each by itself
            if self._old:
                self._events.append(["BlockRemoved", [each], "GPU"])
            else:
                self._events.append({"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU", "group_idx": 0})

    def cleared(self) -> None:
        self._events.append(["AllBlocksCleared"] if self._old else {"type": "AllBlocksCleared"})

    # --- as a publisher

    def flush(self) -> None:
        if not self._events:
            return
        payload = self._encode([time.time(), self._events, self._rank])
        self._events = []
        number, self._number = self._number, self._number + 1
        self._batches.append((number, payload))
        self._publish.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    def restarted(self) -> None:
        self._events = []
        self._batches.clear()
        self._number = 0

    def close(self) -> None:
        if self._loop is not None and self._replay is not None:
            self._loop.remove_reader(self._replay.fileno())
        self._context.destroy(linger=0)

    def _answer(self) -> None:
        """Whoever has asked by now. ZeroMQ tells only of changes, so all of them."""
        assert self._replay is not None
        while self._replay.poll(0):
            frames = self._replay.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # not a request; vLLM says so in its log and goes on
            client, first = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in self._batches:
                if number >= first:
                    self._replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
            self._replay.send_multipart((client, b"", b"", _END, b""))


def publishers_of(settings: MockSettings) -> list[EventPublisher]:
    """One for each rank, if the worker publishes events. Raises OSError."""
    where, profile = settings.kv_events, settings.profile
    if where is None or profile is None:
        return []
    with contextlib.ExitStack() as stack:
        made = []
        for rank in range(settings.dp_size):
            publisher = EventPublisher(
                where.host,
                where.port and where.port + rank,
                where.replay_port and where.replay_port + rank,
                rank=rank,
                block_size=profile.block_size,
                topic=where.topic,
                old=where.old,
            )
            stack.callback(publisher.close)
            made.append(publisher)
        stack.pop_all()
        return made


def _extra_keys(adapter: str | None, salt: str) -> list[str] | None:
    """What beside its tokens tells a block from others: its adapter, and in the first one the salt."""
    return [key for key in (adapter, salt) if key] or None


def _address(bound: zmq.Socket[bytes]) -> str:
    address = bound.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()
