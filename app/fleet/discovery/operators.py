"""What operators may say of workers: for all replicas that share the registry, and obeyed here at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from app.errors import TurnError
from app.fleet.discovery.discovery import OPERATOR_LABEL, Discovery
from app.fleet.discovery.marks import Marks, OperatorMark, State
from app.fleet.specs import WorkerSpec
from app.fleet.workers import Fleet
from app.logs import event
from backends.base import StoreError

log = logging.getLogger("coatcheck.fleet")


class Absent(msgspec.Struct, frozen=True):
    """A worker that is named and not in the fleet, by an operator's word."""

    name: str
    url: str
    mark: OperatorMark


class Operators:
    """Their side of a fleet's discovery."""

    def __init__(self, fleet: Fleet, discovery: Discovery, *, wall: Callable[[], float] = time.time) -> None:
        self._fleet, self._discovery, self._wall = fleet, discovery, wall

    async def mark(self, name: str, state: State, *, by: str, deadline: float = 0.0) -> OperatorMark:
        """An operator's word on a worker, for all replicas; obeyed here at once. `deadline`: seconds from now until a
        draining worker's sessions move; 0: they stay. Raises TurnError `unknown_worker`, `store_unavailable`."""
        marks = self._known_marks()
        wall = self._wall()
        standing = marks.by_name.get(name)
        elsewhere = self._named_elsewhere(name)
        if standing is None and not elsewhere and self._fleet.worker(name) is None:
            raise TurnError("unknown_worker", f"nobody here knows a worker called {name}", param="name")
        until = wall + deadline if state == "draining" and deadline else 0.0
        if standing is None:
            mark = OperatorMark(state=state, by=by, at=wall, deadline=until)
        else:  # with the worker that it adds, if it does
            mark = msgspec.structs.replace(standing, state=state, by=by, at=wall, deadline=until)
        await self._put(marks, name, mark)
        said = event("mark_set", worker=name, mark=state, by=by, deadline=deadline or None)
        text = state if state != "none" else "it is in use again"
        log.warning("worker %s: %s says %s", name, by, text, extra=said)
        self._discovery.apply()
        return mark

    async def add(self, spec: WorkerSpec, *, by: str) -> OperatorMark:
        """An operator names a worker, for all replicas; a removal of it ends. Raises TurnError `invalid_request` where
        the name or the address is another worker's, `store_unavailable`."""
        marks = self._known_marks()
        for label, specs in self._discovery.views():
            for other in specs:
                if label != OPERATOR_LABEL and (other.name == spec.name) != (other.url == spec.url):
                    why = f"{other.name} is at {other.url} already, by {label}"
                    raise TurnError("invalid_request", why, param="worker")
        mark = OperatorMark(
            state="none",
            by=by,
            at=self._wall(),
            url=spec.url,
            ranks=spec.ranks,
            phase=spec.phase,
            handover=spec.handover,
            bootstrap_port=spec.bootstrap_port,
        )
        await self._put(marks, spec.name, mark)
        said = event("worker_added", worker=spec.name, url=spec.url, by=by)
        log.warning("worker %s: %s adds it, at %s", spec.name, by, spec.url, extra=said)
        self._discovery.apply()
        return mark

    def _known_marks(self) -> Marks:
        if self._discovery.marks is None:
            raise TurnError("store_unavailable", "there is no registry to write it into")
        return self._discovery.marks

    async def _put(self, marks: Marks, name: str, mark: OperatorMark) -> None:
        try:
            await marks.put(name, mark, named_elsewhere=self._named_elsewhere(name))
        except StoreError as error:
            why = f"the registry cannot be reached, so not all replicas were told ({error})"
            raise TurnError("store_unavailable", why) from error

    def _named_elsewhere(self, name: str) -> bool:
        return self._discovery.source_of(name) not in ("", OPERATOR_LABEL)

    def absent(self) -> list[Absent]:
        """The workers that an operator's word keeps out of the fleet."""
        if self._discovery.marks is None:
            return []
        wanted = self._discovery.wanted()
        return [
            Absent(name, wanted[name].url if name in wanted else mark.url, mark)
            for name, mark in self._discovery.marks.by_name.items()
            if mark.state != "none" and self._fleet.worker(name) is None
        ]
