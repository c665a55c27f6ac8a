"""Finds out which workers serve which model: what each worker's list said last is remembered (`served`), also in the
registry.

A worker is asked when it comes up, now and then, and at once when a request names a model that nobody is known to
serve. What it said stands until it says something else, also while it is down: a model whose workers are all down is
known, and no replica takes it for one that there never was. Whoever finds a list changed writes it into the registry
(kind `models`, by the worker's name), so that every replica knows it at once, and one that was just started as well.

A worker whose list nobody knows may serve any model: it has no such path, it shows its list to clients' own keys only,
or it has not been reached yet. One that has just come is asked before that is believed of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import httpx
import msgspec

from app.errors import TurnError
from app.fleet.discovery.listening import end_tasks
from app.fleet.discovery.records import Records, follow
from app.fleet.health import State
from app.fleet.models import ModelLists
from app.fleet.served import Known, Served, entry_of, short, shown
from app.fleet.workers import Fleet, Worker
from app.http.headers import Header
from backends.base import StoreError
from backends.registry import MAX_VALUE, Registry

log = logging.getLogger("coatcheck.fleet")

MODELS = "models"
"""The kind of the records."""
_LOOK_EVERY = 0.5
"""Seconds between looks at who has come up, and who is due."""
_MOST_A_SECOND = 4
"""Workers asked on average, and in rounds `_MOST_IN_ROUNDS`: of more workers each is asked less often."""
_MOST_IN_ROUNDS = 20
_ROUNDS_APART = 1.0
"""Seconds between two rounds that requests cause, at least."""
_PATIENCE = 5.0
"""Seconds that a request waits for a round: it may have to wait until one may begin, and in it for what workers were
asked before."""
_TIMES_ANEW = 3
"""That a worker is asked in a row when another replica has told of it meanwhile."""
_ABSENT_FOR = 2.0
"""Seconds in which a name that a round has not found is not looked for again."""
_MOST_ABSENT = 1000
_LONGEST_NAME = 1024
"""Of a model that is looked for, and remembered when it is not found: clients make it."""
_FIRST_ROUND = 1.5
"""Seconds that a start waits for what the registry and the workers say."""
_AT_ONCE = 32
"""Workers asked at the same time."""
_LATE_FOR = 10.0
"""Seconds in which a worker that did not answer in time is left out of rounds."""
_PRUNE_EVERY = 600.0


class _Record(msgspec.Struct, frozen=True):
    """What is written of a worker. Readers ignore fields that they do not know."""

    models: dict[str, msgspec.Raw]
    """Id → entry; null where all entries together are too long for a record."""
    at: float
    """When, in Unix seconds."""
    version: int = 1


_NULL = msgspec.Raw(b"null")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Record).decode


class Lists(Protocol):
    """Asks workers (`models.ModelLists`)."""

    def client(self) -> httpx.AsyncClient: ...

    async def read(
        self, client: httpx.AsyncClient, worker: Worker, headers: list[Header]
    ) -> dict[str, msgspec.Raw]: ...


class Catalog:
    """`start` inside the running loop; `aclose` before it ends. Before `start`, and when it is off, every worker may
    serve every model.

    Long because what is asked of workers, read of other replicas and wanted by turns is one state of each worker."""

    def __init__(
        self,
        fleet: Fleet,
        lists: Lists,
        headers: Callable[[], list[Header]],
        *,
        interval: float = 30.0,
        strict: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        """`headers` says our key for the workers. `interval` in seconds between questions to one worker; 0: off. Not
        `strict`: a model that nobody lists goes to any worker."""
        self._fleet, self._lists, self._headers = fleet, lists, headers
        self._interval = interval
        self._clock, self._wall, self._rng = clock, wall, rng or random.Random()
        self._served = served = Served(fleet, strict=strict, changed=self._wake)
        self.serving, self.choices_with = served.serving, served.choices_with
        self.prefilling = served.prefilling
        self.entries, self.models_of, self.refused = served.entries, served.models_of, served.refused
        self.adapter = served.adapter
        self._wanted: list[tuple[str, asyncio.Future[None]]] = []
        """Who waits for a model."""
        self._absent: dict[str, float] = {}
        """Names that a round has not found, each until when; the oldest first."""
        self._round: asyncio.Task[None] | None = None
        """The next one, which has not begun to ask yet."""
        self._round_at = -_ROUNDS_APART * 1000
        self._hurry = asyncio.Event()
        self._unwritten: set[str] = set()
        self._prune_at = 0.0
        self._registry: Registry | None = None
        self._heard = asyncio.Event()
        """The registry has been read, or could not be."""
        self._asking: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    @staticmethod
    def off(fleet: Fleet) -> Catalog:
        """One that knows nothing and asks nobody."""
        return Catalog(fleet, ModelLists(fleet, ssl.create_default_context), list, interval=0)

    # -- life

    async def start(self, registry: Registry | None) -> None:
        """Begin to ask. Returns when the workers and the registry have said something, or after a moment."""
        if not self._interval:
            return
        self._asking = self._lists.client()
        self._prune_at = self._clock() + _PRUNE_EVERY
        if registry is not None:
            self._registry = registry
            self._spawn(self._follow(registry))
        else:
            self._heard.set()
        first = [self._ask_soon(worker) for worker in self._fleet]
        self._spawn(self._look())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_ROUND):
                await self._heard.wait()
                if first:
                    await asyncio.wait(first)
        for worker in self._fleet:  # whoever was slow is known to be; waiting longer would help nobody
            known = self._served.of(worker)
            known.asked, known.was_up = True, worker.health.state is State.UP
        self._served.recompute()

    async def aclose(self) -> None:
        for _, future in self._wanted:
            future.cancel()
        await end_tasks(list(self._tasks))
        if self._asking is not None:
            await self._asking.aclose()

    # -- what turns ask

    @property
    def partial(self) -> tuple[str, ...]:
        """The models that not every worker serves."""
        return self._served.partial

    @property
    def partly_prefilled(self) -> tuple[str, ...]:
        """The models that not everybody serves who prefills."""
        return self._served.partly_prefilled

    async def learn(self, model: str) -> frozenset[str] | None:
        """As `serving`, of a model that nobody is known to serve, once the workers were asked again, or after
        `_PATIENCE`. To be run in a task. Raises TurnError: `no_worker` when those that served it have left, or are
        still being asked, `model_not_found` when nobody ever did."""
        looked = True
        if len(model) <= _LONGEST_NAME and self._clock() >= self._absent.get(model, 0.0):
            looked = await self._look_for(model)
        among = self.serving(model)
        if among is None or among:
            return among
        if self._served.lists(model):
            raise TurnError("no_worker", f"{self._missing(model)} {shown(model)} is here")
        if self._served.open:
            return self._served.open
        if not looked:
            raise TurnError("no_worker", f"no worker has said yet whether it serves {shown(model)}")
        raise TurnError("model_not_found", f"The model `{short(model)}` does not exist.", param="model")

    def _missing(self, model: str) -> str:
        """What is not here of a model that nobody can be given turns for."""
        if self._fleet.prefilling and self._served.prefilling(model) != frozenset():
            return "no worker that does more than prefill for the model"
        return "no worker that serves the model"

    async def _look_for(self, model: str) -> bool:
        """False: the round is not over, and it may yet be found. One that may not begin yet, because the last one was
        a moment ago, would say what that has said."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wanted = (model, future)
        self._wanted.append(wanted)
        if self._round is None:
            self._round = self._spawn(self._next_round())
        looking = self._round
        looking.add_done_callback(lambda _: _arrive(future))
        try:
            async with asyncio.timeout(_PATIENCE):
                await future
        except TimeoutError:
            return looking is self._round
        else:
            if not self.serving(model):
                self._note_absent(model)
            return True
        finally:
            if wanted in self._wanted:
                self._wanted.remove(wanted)

    def _wake(self) -> None:
        for model, future in self._wanted:
            if self.serving(model) != frozenset():
                _arrive(future)

    def _note_absent(self, model: str) -> None:
        self._absent.pop(model, None)
        self._absent[model] = self._clock() + _ABSENT_FOR
        if len(self._absent) > _MOST_ABSENT:
            del self._absent[next(iter(self._absent))]

    # -- what changes

    def look(self) -> None:
        """Have all workers asked at once: something was done to them."""
        if self._interval:
            for known in self._served.by_name.values():
                known.due = 0.0
            self._hurry.set()

    def fleet_changed(self) -> None:
        """Workers have come or gone."""
        if self._interval:
            self._served.recompute()
            self._hurry.set()

    # -- asking

    async def _look(self) -> None:
        while True:
            try:
                self._tick()
            except Exception:  # a fault of ours: the operator sees it in the log, and what is known stands
                log.exception("workers' lists of models are not looked after")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY):
                    await self._hurry.wait()
            self._hurry.clear()

    def _tick(self) -> None:
        now = self._clock()
        for worker in self._fleet:
            known = self._served.of(worker)
            up = worker.health.state is State.UP
            if now >= known.due or (up and not known.was_up):
                self._ask_soon(worker)
            known.was_up = up
        for name in list(self._unwritten):
            self._unwritten.discard(name)
            self._spawn(self._write(name))
        if now >= self._prune_at:
            self._prune_at = now + _PRUNE_EVERY
            self._prune()

    def _ask_soon(self, worker: Worker) -> asyncio.Task[None]:
        known = self._served.of(worker)
        if known.asking is None or known.asking.done():
            usual = max(self._interval, len(self._fleet) / _MOST_A_SECOND)
            known.due = self._clock() + usual * self._rng.uniform(0.8, 1.2)
            known.asking = self._spawn(self._ask(worker, known))
        return known.asking

    async def _next_round(self) -> None:
        apart = max(_ROUNDS_APART, len(self._fleet) / _MOST_IN_ROUNDS)
        await asyncio.sleep(max(0.0, self._round_at + apart - self._clock()))
        self._round, self._round_at = None, self._clock()
        workers = [each for each in self._fleet if self._clock() >= self._served.of(each).late_until]
        await asyncio.gather(*map(self._ask_anew, workers))

    async def _ask_anew(self, worker: Worker) -> None:
        asking = self._served.of(worker).asking
        if asking is not None and not asking.done():  # asked before the request came: what it says may be older
            await asyncio.wait([asking])
        await asyncio.wait([self._ask_soon(worker)])

    async def _ask(self, worker: Worker, known: Known) -> None:
        for _ in range(_TIMES_ANEW):
            events = known.events
            entries = await self._answer(worker, known)
            if entries is None:
                return
            if known.events == events or known.entries is None or known.entries.keys() == entries.keys():
                break
            # Another replica has heard something meanwhile; ours may be older. Whoever waits for this waits for the
            # worker's word: what was heard may be older as well.
        else:
            known.due = 0.0
            return
        self._served.note(worker.name, known, entries)
        if known.recorded != frozenset(entries):
            self._unwritten.add(worker.name)
            self._hurry.set()

    async def _answer(self, worker: Worker, known: Known) -> dict[str, msgspec.Raw] | None:
        """What the worker says; None: nothing that counts, and that is noted."""
        assert self._asking is not None
        try:
            async with self._slots:
                entries = await self._lists.read(self._asking, worker, self._headers())
        except TurnError as error:
            if known.worker is worker:
                known.refused = error.code == "invalid_api_key"
                known.late_until = self._clock() + _LATE_FOR if error.code == "worker_timeout" else 0.0
                if known.entries is None:
                    known.due = min(known.due, self._clock() + 2.0**known.failures)
                known.failures = min(known.failures + 1, 16)
                if not known.asked:
                    known.asked = True
                    self._served.recompute()
            return None
        if known.worker is not worker:
            return None
        known.refused, known.late_until, known.failures = False, 0.0, 0
        return entries

    # -- the registry

    async def _follow(self, registry: Registry) -> None:
        seen: dict[str, bytes] = {}
        troubled = False
        try:
            async for said in follow(registry, MODELS):
                if isinstance(said, Records):
                    self._read(seen, said.by_name, rewound=said.rewound)
                    seen, troubled = said.by_name, False
                elif not troubled:
                    troubled = True
                    log.warning("what workers serve cannot be read from the registry now: %s", said.why)
                self._heard.set()
        except Exception:  # a fault of ours: the operator sees it in the log, and the workers are asked as ever
            log.exception("what workers serve is not read from the registry any more")
            self._heard.set()

    def _read(self, before: dict[str, bytes], records: dict[str, bytes], *, rewound: bool) -> None:
        for name, value in records.items():
            if before.get(name) == value and not rewound:
                continue
            try:
                record = _decode(value)
            except (msgspec.DecodeError, RecursionError) as error:
                log.warning("the record of what worker %s serves cannot be read: %s", name, error)
                continue
            known = self._served.by_name.setdefault(name, Known())
            known.events += 1
            known.recorded, known.recorded_at = frozenset(record.models), record.at
            if known.entries is None or known.entries.keys() != record.models.keys():
                entries = {
                    model: entry_of(model) if entry == _NULL else entry for model, entry in record.models.items()
                }
                self._served.note(name, known, entries)
        forgotten = False
        for name in [name for name, known in self._served.by_name.items() if name not in records]:
            known = self._served.by_name[name]
            was_there, known.recorded = known.recorded is not None, None
            if self._fleet.worker(name) is not None:
                if known.entries is not None:
                    self._unwritten.add(name)  # it was removed by a replica that does not have the worker, or lost
            elif was_there and not rewound:
                del self._served.by_name[name]
                forgotten = True
        if forgotten:  # of what has come it was done already
            self._served.recompute()

    async def _write(self, name: str) -> None:
        known = self._served.by_name.get(name)
        if self._registry is None or known is None or known.entries is None:
            return
        names = frozenset(known.entries)
        value = _encode(_Record(dict(known.entries), self._wall()))
        if len(value) > MAX_VALUE:
            value = _encode(_Record(dict.fromkeys(known.entries, _NULL), self._wall()))
        if len(value) > MAX_VALUE or known.recorded == names:
            return  # too long to be remembered by others: they ask for themselves
        try:
            await self._registry.put(MODELS, name, value, None)
        except StoreError:  # told by whoever follows the registry; tried again when the worker was asked again
            return
        known.recorded, known.recorded_at = names, self._wall()

    def _prune(self) -> None:
        for name in self._served.prune(self._wall()):
            self._spawn(self._remove(name))

    async def _remove(self, name: str) -> None:
        if self._registry is not None:
            with contextlib.suppress(StoreError):  # the next replica that is started prunes it
                await self._registry.remove(MODELS, name)

    # -- helpers

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _arrive(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
