"""What operators have decided of workers: cordon, drain, remove, add. Records under `marks/` in the registry at the
claims, by the worker's name: every replica obeys them, and they outlive restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Literal

import msgspec

from app.fleet.discovery.listening import Told, end_tasks
from app.fleet.discovery.records import Records, follow
from app.fleet.discovery.source import Trouble
from app.fleet.specs import (
    BOOTSTRAP_PORT,
    HANDOVERS,
    WorkerSpec,
    checked_handover,
    checked_phase,
    checked_port,
    checked_ranks,
    normal_url,
)
from backends.base import StoreError
from backends.registry import Registry

log = logging.getLogger("coatcheck.fleet")

MARKS = "marks"
"""The kind of the records."""
_FORGOTTEN_AFTER = 86_400.0
"""Seconds after which a removal is forgotten of a worker that only an operator had named."""

State = Literal["none", "cordoned", "draining", "removed"]


class OperatorMark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An operator's word on one worker. Readers ignore fields that they do not know."""

    state: State
    by: str
    """Who said so, as they call themselves."""
    at: float
    """When, in Unix seconds by the clock of the replica that was told."""
    deadline: float = 0.0
    """When a draining worker's sessions move, in Unix seconds; 0: never."""
    url: str = ""
    """Of a worker that an operator has added."""
    ranks: int = 0
    phase: str = "both"
    handover: str = HANDOVERS[0]
    bootstrap_port: int = BOOTSTRAP_PORT
    version: int = 1

    def ends(self, now: float) -> bool:
        """The worker is to be used no more, as one that is gone. `now` in Unix seconds."""
        return self.state == "removed" or (self.state == "draining" and 0 < self.deadline <= now)

    def spec(self, name: str) -> WorkerSpec | None:
        """Of the worker that it adds; None: it adds none."""
        if not self.url:
            return None
        return WorkerSpec(
            name=name,
            url=self.url,
            ranks=self.ranks,
            phase=checked_phase(self.phase),
            handover=checked_handover(self.handover),
            bootstrap_port=checked_port(self.bootstrap_port),
        )


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(OperatorMark).decode


class Marks:
    """The marks of one registry, as they stand, from `begin` to `aclose`."""

    def __init__(self, registry: Registry, changed: Callable[[], None], told: Told) -> None:
        """`changed` is called when `by_name` may have."""
        self._registry, self._changed, self._told = registry, changed, told
        self.by_name: dict[str, OperatorMark] = {}
        self.trouble = ""
        """Why they cannot be read now; the last ones stand."""
        self._heard = asyncio.Event()
        self._again = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Inside the running loop."""
        self._task = asyncio.create_task(self._follow())

    def look(self) -> None:
        """Read them at once where they could not be read."""
        self._again.set()

    async def wait(self) -> None:
        """Until they have been read, or could not be."""
        await self._heard.wait()

    async def aclose(self) -> None:
        await end_tasks([self._task])

    async def _follow(self) -> None:
        try:
            async for said in follow(self._registry, MARKS, self._again):
                trouble = said.why if isinstance(said, Trouble) else ""
                if isinstance(said, Records):
                    self._read(await self._written_again(said.by_name) if said.rewound else said.by_name)
                elif not self.trouble:
                    log.warning("operators' marks: %s; the last ones stand, %d of them", trouble, len(self.by_name))
                self.trouble = trouble
                self._heard.set()
                self._changed()
        except Exception:  # a fault of ours: the operator sees it in the log, and the last marks stand
            log.exception("operators' marks are not followed any more")
            self.trouble = "they are not followed any more; the log has the reason"

    async def _written_again(self, records: dict[str, bytes]) -> dict[str, bytes]:
        """With the marks that were known here and that a registry lacks which was wiped, or restored from a backup:
        that they are not there is nobody's word."""
        lost = {name: _encode(mark) for name, mark in self.by_name.items() if name not in records}
        for name, value in lost.items():
            with contextlib.suppress(StoreError):  # the next replica that notices, or the next such look
                await self._registry.put(MARKS, name, value, None)
        return records | lost

    def _read(self, records: dict[str, bytes]) -> None:
        marks: dict[str, OperatorMark] = {}
        refused = []
        for name, value in sorted(records.items()):
            try:
                mark = _decode(value)
                if mark.url:
                    mark = msgspec.structs.replace(mark, url=normal_url(mark.url))
                if mark.ranks:
                    checked_ranks(mark.ranks)
                checked_phase(mark.phase)
                checked_handover(mark.handover)
                checked_port(mark.bootstrap_port)
            except ValueError as error:
                refused.append(f"operators' mark {name} cannot be read, and does nothing: {error}")
            else:
                marks[name] = mark
        self.by_name = marks
        self._told.now("marks", refused)

    async def put(self, name: str, mark: OperatorMark, *, named_elsewhere: bool) -> None:
        """Write it, and obey it here at once. A mark that says nothing is removed. Raises StoreError."""
        if mark.state == "none" and not mark.url:
            await self._registry.remove(MARKS, name)
            self.by_name.pop(name, None)
            return
        passing = mark.state == "removed" and not named_elsewhere
        await self._registry.put(MARKS, name, _encode(mark), _FORGOTTEN_AFTER if passing else None)
        self.by_name[name] = mark
