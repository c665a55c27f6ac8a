"""KV events, from the wire to shelves: what one rank of a worker says of its blocks.

The format is that of vLLM (`vllm/distributed/kv_events.py`; SGLang has taken it over): a batch is msgpack,
`[time, [event, ...], rank]`; an event is a map with a `type`, or (before 0.24) an array that begins with it.

What is not understood is not believed: blocks whose tokens do not tell all that distinguishes them (pictures, unknown
extra keys), whose parent is not known, or which are not in the GPU's memory, are passed over, and so is what follows
on them. So what is known is always a part of what there is. The one exception would be a removal that was missed, so
whoever reads the batches has `forget` called when one may be missing (`feeds`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import msgspec

from app.fleet.placement.index import NAME, Index, Shelf, links, root, token_bytes

_A_PIECE = 64
"""Blocks after which whoever applies a batch may pause."""
_HERE = "GPU"
"""The memory from which engines compute."""
_MOST_GROUPS = 64
_MOST_BLOCK = 1 << 16
_MOST_HASH = (1 << 64) - 1


class Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """Its fields stand in the order of the array."""

    block_hashes: Any = None
    parent_block_hash: Any = None
    token_ids: Any = None
    block_size: Any = None
    lora_id: Any = None
    medium: Any = None
    lora_name: Any = None
    extra_keys: Any = None
    group_idx: Any = None


class Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: Any = None
    medium: Any = None
    group_idx: Any = None


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    medium: ClassVar[None] = None


Event = Stored | Removed | Cleared
_KINDS: dict[str, type[Event]] = {"BlockStored": Stored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared}
_EVENTS = frozenset(_KINDS.values())


class Batch(msgspec.Struct, frozen=True):
    rank: int | None
    events: Sequence[Any]
    """Each an event, or what one is said with."""


class _Usual(msgspec.Struct, array_like=True):
    """A batch whose events are all maps of a known type."""

    time: Any
    events: list[Event]
    rank: int | None = None


_decode_usual = msgspec.msgpack.Decoder(_Usual).decode
_decode = msgspec.msgpack.Decoder().decode


def read(payload: bytes) -> Batch:
    """Raises ValueError."""
    try:
        usual = _decode_usual(payload)
    except msgspec.ValidationError:
        pass
    else:
        return Batch(usual.rank, usual.events)
    said = _decode(payload)  # raises a ValueError
    if not isinstance(said, list) or len(said) < 2 or not isinstance(said[1], list):
        raise ValueError("no batch of events")
    rank = said[2] if len(said) > 2 else None
    if rank is not None and type(rank) is not int:
        raise ValueError(f"a rank is no {rank!r}")
    return Batch(rank, said[1])


def _event(said: Any) -> Event:
    """Raises ValueError."""
    if isinstance(said, dict):
        kind = _kind(said.get("type"))
        return kind(*map(said.get, kind.__struct_fields__))
    if not isinstance(said, list) or not said:
        raise ValueError("no event")
    kind = _kind(said[0])
    return kind(*said[1 : 1 + len(kind.__struct_fields__)])


def _kind(said: Any) -> type[Event]:
    kind = _KINDS.get(str(said))
    if kind is None:
        raise ValueError(f"the event {str(said)[:40]!r} is not known")
    return kind


class Holdings:
    """What is known of one rank's cache: a shelf for each group of it."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.shelves: dict[int, Shelf] = {}
        self.opaque = 0
        """Blocks that were passed over, since they are not told in full."""
        self._since = 0
        """Blocks and events since a pause."""

    def forget(self) -> list[Shelf]:
        """Nothing is known any more. Returns the shelves that the index is to be swept of."""
        dead = list(self.shelves.values())
        for shelf in dead:
            shelf.dead = True
        self.shelves = {}
        return dead

    def apply(self, batch: Batch, dead: list[Shelf]) -> Iterator[None]:
        """In pieces of `_A_PIECE` blocks, or events that tell of none; two such pieces at most. Raises ValueError where
        it is not understood: then `forget`. `dead` gets shelves that are."""
        self._since = 0
        gone: list[Removed] = []
        for said in batch.events:
            event = said if type(said) in _EVENTS else _event(said)
            if event.medium != _HERE and _is_elsewhere(event.medium):
                if self._done(1):
                    yield
                continue
            if type(event) is Removed:
                gone.append(event)  # engines tell of each block by itself, and of many in a row
                if len(gone) < _A_PIECE:
                    continue
            if gone:
                yield from self._removed(gone)
                gone = []
            if type(event) is Stored:
                yield from self._stored(event)
            elif type(event) is Cleared:
                dead += self.forget()
            if type(event) is not Removed and self._done(1):
                yield
        if gone:
            yield from self._removed(gone)

    def _done(self, blocks: int) -> bool:
        """So many more; whether that is a piece."""
        self._since += blocks
        if self._since < _A_PIECE:
            return False
        self._since = 0
        return True

    def _removed(self, events: list[Removed]) -> Iterator[None]:
        groups = {event.group_idx for event in events}
        for group in groups:
            names = _names([event.block_hashes for event in events if len(groups) == 1 or event.group_idx == group])
            shelf = self.shelves.get(_group(group))
            if shelf is None:
                continue
            for piece in _pieces(names):
                self._index.take(shelf, piece)
                if self._done(len(piece) // NAME):
                    yield

    def _stored(self, event: Stored) -> Iterator[None]:
        names, size, group = _names([event.block_hashes]), event.block_size, _group(event.group_idx)
        count = len(names) // NAME
        if type(size) is not int or not 0 < size <= _MOST_BLOCK:
            raise ValueError(f"a block has no {size!r} tokens")
        tokens = event.token_ids
        if not isinstance(tokens, list) or len(tokens) != size * count:
            raise ValueError("not as many tokens as the blocks have")
        shelf = self.shelves.get(group)
        if shelf is None:
            shelf = self.shelves[group] = Shelf(size)
        elif shelf.block_size != size:
            raise ValueError(f"blocks of {size} tokens among those of {shelf.block_size}")
        adapter, keys, parent = event.lora_name, event.extra_keys, event.parent_block_hash
        if (adapter is None) != (event.lora_id is None) or not isinstance(keys, list) or len(keys) != count:
            # Which adapter, or which salt or pictures, is not said.
            yield from self._passed_over(shelf, names)
            return
        before = None if parent is None else shelf.find(_name(parent))
        if parent is not None and before is None:
            yield from self._passed_over(shelf, names)
            return
        if adapter is None and not any(keys):  # nearly all
            last = root(size, "", "") if before is None else before
            for number, piece in enumerate(_pieces(names)):
                begin = number * _A_PIECE * size
                blocks = links(last, token_bytes(tokens[begin : begin + _A_PIECE * size]), size)
                self._index.put(shelf, piece, blocks)
                last = blocks[-1]
                if self._done(len(blocks)):
                    yield
            return
        for number in range(count):
            salt = _salt(keys[number], adapter)
            if salt is None or (salt and (number or parent is not None)):
                yield from self._passed_over(shelf, names[number * NAME :])
                return
            if before is None:
                before = root(size, adapter or "", salt)
            (before,) = links(before, token_bytes(tokens[number * size : (number + 1) * size]), size)
            self._index.put(shelf, names[number * NAME : (number + 1) * NAME], [before])
            if self._done(1):
                yield

    def _passed_over(self, shelf: Shelf, names: bytes) -> Iterator[None]:
        """What was known under these names is not true any more."""
        self.opaque += len(names) // NAME
        for piece in _pieces(names):
            self._index.take(shelf, piece)
            if self._done(len(piece) // NAME):
                yield


def _is_elsewhere(medium: Any) -> bool:
    """Not in the memory from which the engine computes."""
    return medium is not None and str(medium).upper() != _HERE


def _group(said: Any) -> int:
    group = said or 0
    if type(group) is not int or not 0 <= group < _MOST_GROUPS:
        raise ValueError(f"a group of the cache is no {group!r}")
    return group


def _names(hashes: list[Any]) -> bytes:
    """What the worker calls the blocks of some events, as shelves have it: its hashes, or eight bytes of each."""
    if set(map(type, hashes)) != {list}:
        raise ValueError("no hashes of blocks")
    return _packed(hashes[0] if len(hashes) == 1 else list(chain.from_iterable(hashes)))


def _packed(hashes: list[Any]) -> bytes:
    if len(hashes) == 1:
        return _name(hashes[0])
    if set(map(type, hashes)) == {int}:
        try:
            return array("Q", hashes).tobytes()
        except OverflowError:
            pass  # with a sign
    return b"".join(map(_name, hashes))


def _name(said: Any) -> bytes:
    if type(said) is int:
        return (said & _MOST_HASH).to_bytes(NAME, sys.byteorder)
    if isinstance(said, bytes) and len(said) >= NAME:
        return said[-NAME:]
    raise ValueError(f"no hash of a block: {said!r:.40}")


def _pieces(names: bytes) -> Iterable[bytes]:
    """Of as many blocks as are handled at once."""
    if len(names) <= NAME * _A_PIECE:
        return (names,) if names else ()
    return (names[at : at + NAME * _A_PIECE] for at in range(0, len(names), NAME * _A_PIECE))


def _salt(keys: Any, adapter: str | None) -> str | None:
    """What the extra keys of a block say beside its adapter: a salt, or nothing; None: something else."""
    left = list(keys) if isinstance(keys, list | tuple) else [] if keys is None else [keys]
    if adapter is not None:
        if adapter not in left:
            return None
        left.remove(adapter)
    if not left:
        return ""
    return left[0] if len(left) == 1 and isinstance(left[0], str) else None
