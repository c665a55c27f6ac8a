"""Makes the fleet what its sources and its operators say.

The views of all sources are laid over one another: the first that names a worker, or its address, decides how it is
described. A worker that no view names any more is *leaving*: it gets no new sessions, keeps its own, and is gone when
that has lasted for the grace; one that is named again before is the same as ever. Under the same name at another
address, or with another incarnation, it is another one that has nothing in its cache: its sessions go there, and what
was known of the old one is not believed of it.

What decides is `apply`, which awaits nothing; the rest listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from app.fleet.discovery.listening import Listener, Told
from app.fleet.discovery.marks import Marks, OperatorMark
from app.fleet.discovery.source import Source
from app.fleet.specs import WorkerSpec
from app.fleet.workers import Fleet, Mark, Worker
from app.logs import event
from backends.registry import Registry

log = logging.getLogger("coatcheck.fleet")

_FIRST_WORD_WITHIN = 5.0
"""Seconds that a start waits for each source to say something."""
_LONGEST_WAIT = 3600.0
"""Seconds until deadlines are looked at again at the latest: the wall clock may be set."""
SETTINGS_LABEL = "--worker"
OPERATOR_LABEL = "operator"


class Discovery:
    """Begins to listen with `start`, inside the running loop; `aclose` before the loop ends."""

    def __init__(
        self,
        fleet: Fleet,
        make: Callable[[WorkerSpec, bool], Worker],
        named: Iterable[WorkerSpec] = (),
        *,
        grace: float,
        changed: Callable[[], None] = lambda: None,
        gone: Callable[[str], None] = lambda name: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`make` makes a worker; it is told whether that comes to a fleet that runs. `named` are in the settings; they
        are in the fleet at once. `grace` in seconds. `changed` is called when workers have come or gone, `gone` with
        the name of each that has."""
        self._fleet, self._make, self._named, self._grace = fleet, make, tuple(named), grace
        self._changed, self._gone, self._clock, self._wall = changed, gone, clock, wall
        self._told = Told()
        self.sources = Listener(self.apply, self._told)
        self.marks: Marks | None = None
        """The operators' word; None: there is no registry to read it from."""
        self._left_at: dict[str, float] = {}
        """When those that are leaving were named no more."""
        self._timer: asyncio.TimerHandle | None = None
        self._runs = False
        """Turns are taken; before, whoever comes has been there before us."""
        self.apply()

    # -- life

    async def start(self, registry: Registry | None, sources: Sequence[Source]) -> None:
        """Listen to the sources, and to the operators' marks in `registry`. Returns when all have said something, or
        after a moment without: a replica that took turns before it knows its workers would take those that it has not
        heard of for gone."""
        if registry is not None:
            self.marks = Marks(registry, self.apply, self._told)
            self.marks.begin()
        self.sources.begin(sources)
        self._fleet.look, self._fleet.deaf = self._look, self._deaf
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_WORD_WITHIN):
                await self.sources.wait()
                if self.marks is not None:
                    await self.marks.wait()
        self._runs = True
        for each in self.sources:
            if not each.heard:
                log.warning("workers from %s: nothing was said within %g s", each.source.label, _FIRST_WORD_WITHIN)

    async def aclose(self) -> None:
        """Stop listening. The fleet stays as it is."""
        if self._timer is not None:
            self._timer.cancel()
        if self.marks is not None:
            await self.marks.aclose()
        await self.sources.keep(())

    async def follow(self, named: Iterable[WorkerSpec], sources: Sequence[Source], labels: Sequence[str]) -> None:
        """Other settings: these workers, and the sources of these labels, of which some are there already, with what
        they have said, and the others begin."""
        self._named = tuple(named)
        await self.sources.keep(labels)
        self.sources.begin(sources)
        self.apply()

    def _look(self) -> None:
        self.sources.look()
        if self.marks is not None:
            self.marks.look()

    def _deaf(self) -> bool:
        return any(each.trouble for each in self.sources) or (self.marks is not None and self.marks.trouble != "")

    # -- deciding

    def apply(self) -> None:
        """Make the fleet so."""
        now, wall = self._clock(), self._wall()
        before = {worker.name: worker for worker in self._fleet}
        wanted = self.wanted()
        marks = self.marks.by_name if self.marks is not None else {}
        due: list[float] = []
        for name, spec in wanted.items():
            mark = marks.get(name)
            deadlines = [spec.until] if spec.draining else []
            if mark is not None and mark.state == "draining":
                deadlines.append(mark.deadline)
            due += [at - wall for at in deadlines if at > wall]
            if (mark is not None and mark.ends(wall)) or any(0 < at <= wall for at in deadlines):
                if name in before:
                    self._let_go(name, "it was removed" if mark and mark.state == "removed" else "its drain is over")
                continue
            self._keep(spec, mark)
        for name, worker in before.items():
            if name in wanted or self._fleet.worker(name) is not worker:
                continue
            mark = marks.get(name)
            if mark is not None and mark.ends(wall):
                self._let_go(name, "it was removed" if mark.state == "removed" else "its drain is over")
            elif worker.spec is not None and worker.spec.draining:
                self._let_go(name, "it was draining, and is named no more")
            else:
                due.append(self._leave(worker, now))
        self._set_timer([each for each in due if each > 0])
        if before != {worker.name: worker for worker in self._fleet}:
            self._changed()

    def views(self) -> list[tuple[str, Iterable[WorkerSpec]]]:
        """What each says, in the order in which they decide."""
        views: list[tuple[str, Iterable[WorkerSpec]]] = [(SETTINGS_LABEL, self._named), *self.sources.named()]
        if self.marks is not None:
            added = [mark.spec(name) for name, mark in self.marks.by_name.items()]
            views.append((OPERATOR_LABEL, [spec for spec in added if spec is not None]))
        return views

    def wanted(self) -> dict[str, WorkerSpec]:
        """All that are named, each once, by name."""
        wanted: dict[str, WorkerSpec] = {}
        urls: dict[str, str] = {}
        odd: list[str] = []
        for label, specs in self.views():
            for spec in specs:
                same = wanted.get(spec.name)
                known_as = urls.get(spec.url)
                if same is not None:
                    if same.url != spec.url:
                        odd.append(f"worker {spec.name} is at {same.url}; {label} says {spec.url}: passed over")
                elif known_as is not None:
                    odd.append(f"worker {known_as} is at {spec.url}; {label} calls it {spec.name}: passed over")
                else:
                    wanted[spec.name] = spec
                    urls[spec.url] = spec.name
        self._told.now("twofold", odd)
        return wanted

    def _keep(self, spec: WorkerSpec, mark: OperatorMark | None) -> None:
        """It is named, and of the fleet."""
        worker = self._fleet.worker(spec.name)
        if worker is None or worker.spec is None or spec.is_another(worker.spec):
            worker = self._come(spec, worker)
        elif self._left_at.pop(spec.name, None) is not None:
            log.warning("worker %s is named again, and stays", spec.name, extra=event("worker_stays", worker=spec.name))
        worker.leaving = False
        if worker.spec is not None and worker.spec.incarnation and not spec.incarnation:
            spec = msgspec.structs.replace(spec, incarnation=worker.spec.incarnation)
        worker.spec = spec
        said: Mark = "draining" if spec.draining else "none"
        why = "it says so itself" if spec.draining else "that has ended"
        if mark is not None and mark.state in ("cordoned", "draining"):
            said, why = mark.state, f"by {mark.by}"
        if said != worker.mark:
            marked = event("mark", worker=spec.name, from_=worker.mark, to=said, reason=why)
            log.warning("worker %s: mark %s -> %s: %s", spec.name, worker.mark, said, why, extra=marked)
            worker.mark = said

    def _come(self, spec: WorkerSpec, old: Worker | None) -> Worker:
        worker = self._make(spec, self._runs)
        if old is not None and old.spec is not None:
            if spec.url != old.spec.url:
                why = f"has moved from {old.url} to {spec.url}; its cache is empty"
            elif spec.is_colder(old.spec):
                why = "has come back with an empty cache"
            else:
                why = "is described otherwise now, and begins anew"
            log.warning("worker %s %s", spec.name, why, extra=event("worker_anew", worker=spec.name, reason=why))
        elif self._runs:
            said = event("worker_come", worker=spec.name, url=spec.url)
            log.info("worker %s at %s has come", spec.name, spec.url, extra=said)
        self._left_at.pop(spec.name, None)
        self._fleet.put(worker)
        return worker

    def _leave(self, worker: Worker, now: float) -> float:
        """It is named no more. Returns how many seconds it still has."""
        since = self._left_at.get(worker.name)
        if since is None:
            since = self._left_at[worker.name] = now
            worker.leaving = True
            text = "worker %s is named no more: it gets no new sessions, and is gone in %g s"
            said = event("worker_leaving", worker=worker.name, seconds=self._grace)
            log.warning(text, worker.name, self._grace, extra=said)
        left = since + self._grace - now
        if left <= 0:
            self._let_go(worker.name, f"it was not named for {self._grace:g} s")
        return left

    def _let_go(self, name: str, why: str) -> None:
        self._left_at.pop(name, None)
        self._fleet.remove(name)
        self._gone(name)
        said = event("worker_gone", worker=name, reason=why)
        log.warning("worker %s is gone: %s; its sessions move with their next turn", name, why, extra=said)

    def _set_timer(self, due: Sequence[float]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(min(min(due) + 0.001, _LONGEST_WAIT), self.apply)

    # -- looking

    def mark_of(self, name: str) -> OperatorMark | None:
        return self.marks.by_name.get(name) if self.marks is not None else None

    def source_of(self, name: str) -> str:
        """The label of who names the worker; empty: nobody does any more."""
        return next((label for label, specs in self.views() if any(spec.name == name for spec in specs)), "")

    def overview(self) -> list[tuple[str, int, str]]:
        """Of the settings and each source: its label, how many workers it names, its trouble (empty: none)."""
        found = [(each.source.label, len(each.view.workers), each.trouble) for each in self.sources]
        return [(SETTINGS_LABEL, len(self._named), ""), *found]

    def seconds_left(self, worker: Worker) -> float | None:
        """Until a leaving worker is gone; None: it is not leaving."""
        since = self._left_at.get(worker.name)
        return None if since is None else max(0.0, since + self._grace - self._clock())
