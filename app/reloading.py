"""Settings that change while the router runs: read again on SIGHUP, or when one of their files has changed.

What cannot be used changes nothing, and is told with its line. What cannot change at run time is named and left as it
was. With `--processes` the parent reads, and passes what stands to the others through a file in memory (`Passed`): all
of them have the same settings, or none.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from app import Trouble
from app.config import Settings
from app.fleet.discovery.source import Aside
from app.logs import event
from app.sources import EffectiveSettings
from app.values import mask

log = logging.getLogger("coatcheck")

NOT_TAKEN_UP = "the settings stay as they were: %s"
LOOK_EVERY = 1.0
"""Seconds between looks at the files."""
_HEAD = struct.Struct("<QQ16s")
"""Of what is passed: its number, its length, and its digest, by which what is half written is told from it."""

_Stamps = tuple[tuple[int, int, int] | None, ...]


class Rereading:
    """The settings' sources, and what of them stands."""

    def __init__(self, settings: Settings, read: Callable[[], EffectiveSettings], config: Path | None) -> None:
        """`read` reads all sources again, and raises Trouble; `config` is the file among them."""
        self.settings = settings
        self._read, self._config = read, config
        self._asked = False
        self._acted_on = self._seen = self.stamps()

    def ask(self) -> None:
        """Read again at the next look; to be called from a signal handler too."""
        self._asked = True

    def stamps(self) -> _Stamps:
        """Of the files, as they are now; blocks."""
        listen, access, workers = self.settings.listen, self.settings.access, self.settings.workers
        found: list[tuple[int, int, int] | None] = []
        for file in (self._config, access.api_keys, workers.worker_api_key_file, listen.tls_cert, listen.tls_key):
            stamp = None
            if file is not None:
                with contextlib.suppress(OSError):
                    there = file.stat()
                    stamp = (there.st_ino, there.st_mtime_ns, there.st_size)
            found.append(stamp)
        return tuple(found)

    def again(self, stamps: _Stamps) -> Settings | None:
        """The settings that stand from now on; None: they are as they were. A file that is being written is left alone
        until it stands still for a look."""
        still, self._seen = stamps == self._seen, stamps
        if not self._asked and (stamps == self._acted_on or not still):
            return None
        self._asked = False
        self._acted_on = stamps
        try:
            settings, changed, fixed = self._read().change(self.settings)
        except Trouble as trouble:
            for line in trouble.lines:
                log.warning(NOT_TAKEN_UP, line, extra=event("reload_refused", reason=line))
            return None
        if fixed:
            text = "cannot change while the router runs, so restart it for: %s"
            log.warning(text, ", ".join(fixed), extra=event("reload_needs_restart", settings=", ".join(fixed)))
        named = ", ".join(changed) or "none of them"
        log.info("the settings were read again; changed: %s", named, extra=event("reload", settings=named))
        self.settings = settings
        # Also when no setting differs: what the files that they name say may.
        return settings

    async def changes(self) -> AsyncIterator[Settings]:
        """Whenever they change. Does not end."""
        aside = Aside("settings")
        while True:
            await asyncio.sleep(LOOK_EVERY if not self._asked else 0.0)
            with contextlib.suppress(TimeoutError):  # of a file system that hangs; the settings stay
                settings = self.again(await aside.run(self.stamps))
                if settings is not None:
                    yield settings


class Passed:
    """Settings from the parent to its processes, in a file in memory that both have open."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Without `descriptor` it is made, and `write` is for its maker."""
        self.descriptor = os.memfd_create("coatcheck-settings") if descriptor is None else descriptor
        self._number = 0

    def write(self, settings: Settings) -> None:
        self._number += 1
        body = settings.dump().encode()
        os.pwrite(self.descriptor, body, _HEAD.size)
        os.pwrite(self.descriptor, _HEAD.pack(self._number, len(body), _digest(body)), 0)

    def read(self) -> Settings | None:
        """What was written since the last time; None: nothing, or not whole yet."""
        head = os.pread(self.descriptor, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        number, length, digest = _HEAD.unpack(head)
        if number == self._number:
            return None
        body = os.pread(self.descriptor, length, _HEAD.size)
        if _digest(body) != digest:
            return None
        self._number = number
        return Settings.load(body.decode())

    async def changes(self, replica: str) -> AsyncIterator[Settings]:
        """As `Rereading.changes`, for the process that is called `replica`."""
        while True:
            await asyncio.sleep(LOOK_EVERY / 2)
            try:
                settings = self.read()
            except (Trouble, ValueError, OSError, json.JSONDecodeError) as error:
                # The parent could use it just now: a file that it names has changed meanwhile, and will be read again.
                said = mask(str(error))
                log.warning(NOT_TAKEN_UP, said, extra=event("reload_refused", reason=said))
                continue
            if settings is not None:
                store = settings.store.model_copy(update={"replica": replica})
                yield settings.model_copy(update={"store": store})


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
