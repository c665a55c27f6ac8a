"""Sessions that have ended and whose claims are still to be closed: while this replica runs in its memory, and from its
end to the next start of any replica on this machine (with the same user and claims) in a small file.

The file is written when a replica ends in an orderly way and the store has not let it close what it should. One that is
killed takes its pending closes with it: those claims end by their TTL.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from backends.base import Claim

T = TypeVar("T")

_SECONDS = 1.0
"""Spent on the files at most: their file system may hang, and neither start nor end may wait for it."""
_MAX_FILES = 1000


class Ending(msgspec.Struct, eq=False):
    """A session's end."""

    key: str
    moment: float
    """When, in Unix seconds. What was created later is a successor's."""
    nonce: str = ""
    """Of the claim that is known to be its."""
    whatever: bool = False
    """Also what is no claim that can be read."""

    def covers(self, claim: Claim, replica: str = "") -> bool:
        """The claim is of the session that has ended, and no successor's. A claim says whole seconds: one of the second
        of the end is a successor's for all we know, unless `replica` made it, which knows. Where the creator's clock is
        apart from ours, a claim made in that time before or after the end is judged wrongly."""
        made = claim.value.created_at
        if claim.value.nonce == self.nonce or made < int(self.moment):
            return True
        return claim.value.replica == replica != "" and made <= self.moment


_decode = msgspec.json.Decoder(list[Ending]).decode
_encode = msgspec.json.Encoder().encode


class EndingFiles:
    """The endings that replicas before this one left, and those that this one leaves."""

    def __init__(self, folder: Path, claims: str) -> None:
        """`claims`: the store's URL; what is left for another store is left alone."""
        self._folder = folder
        parts = urlsplit(claims)
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._prefix = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()

    async def load(self) -> list[tuple[Path, list[Ending]]]:
        """Each file with what stands in it. It is to be given to `remove` when all of that is done. Raises OSError."""
        return await _in_a_thread(self._load)

    async def save(self, endings: Sequence[Ending]) -> None:
        """Raises OSError."""
        await _in_a_thread(lambda: self._save(_encode(endings)))

    async def remove(self, file: Path) -> None:
        """Raises OSError."""
        await _in_a_thread(lambda: file.unlink(missing_ok=True))

    def _load(self) -> list[tuple[Path, list[Ending]]]:
        found = []
        for file in sorted(self._folder.glob(f"{self._prefix}-*.json"))[:_MAX_FILES]:
            try:
                found.append((file, _decode(file.read_bytes())))
            except FileNotFoundError:
                continue  # another replica has just done them
            except ValueError:
                found.append((file, []))  # cut off by a crash: nothing can be done for it
        return found

    def _save(self, content: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._folder / f"{self._prefix}-{secrets.token_hex(8)}.json"
        unfinished = file.with_suffix(".new")
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(descriptor)
            unfinished.rename(file)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise


async def _in_a_thread(work: Callable[[], T]) -> T:
    """In one that may be left behind when its file system hangs: the pool's would be waited for at exit. Raises
    OSError, TimeoutError (one of them) included."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(settling: Callable[..., None], outcome: object) -> None:
        if not result.done():
            settling(outcome)

    def run() -> None:
        try:
            settling: tuple[Callable[..., None], object] = (result.set_result, work())
        except BaseException as error:  # for whoever awaits it
            settling = (result.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended without us
            loop.call_soon_threadsafe(settle, *settling)

    threading.Thread(target=run, daemon=True, name="coatcheck-endings").start()
    async with asyncio.timeout(_SECONDS):
        return await result
