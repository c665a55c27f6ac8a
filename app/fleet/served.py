"""What is known of the models that workers serve, and what follows from it. In memory; `catalog` finds it out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from app.fleet.workers import Fleet, Worker

log = logging.getLogger("coatcheck.fleet")

_KEPT_FOR = 86_400.0
"""Seconds that the list of a worker is remembered which has left."""
_MOST_NAMES_TOLD = 8
_LONGEST_TOLD = 200
_EVERYBODY: frozenset[frozenset[str] | None] = frozenset({None})
_encode = msgspec.json.Encoder().encode


class Known(msgspec.Struct, eq=False):
    """What is known of one worker, by its name: of one that has left as well."""

    worker: Worker | None = None
    """The one that was asked last."""
    entries: dict[str, msgspec.Raw] | None = None
    """Its list; None: nobody knows it."""
    asked: bool = False
    """Its first question has been answered, or was in vain."""
    refused: bool = False
    """It shows its list to others, with their own keys."""
    was_up: bool = False
    due: float = 0.0
    late_until: float = 0.0
    failures: int = 0
    """In a row."""
    recorded: frozenset[str] | None = None
    """The names in its record; None: there is none, or none that can be read."""
    recorded_at: float = 0.0
    """When that was written, in Unix seconds."""
    left_at: float = 0.0
    """When the worker was missed in the fleet; 0: it was not."""
    events: int = 0
    """How often the registry has told of it: what was asked before that may be older."""
    asking: asyncio.Task[None] | None = None


class Served:
    """Which workers serve which model. Turns only look names up: what they find is made when something changes
    (`recompute`). Awaits nothing."""

    def __init__(self, fleet: Fleet, *, strict: bool, changed: Callable[[], None]) -> None:
        """Not `strict`: a model that nobody lists goes to any worker. `changed` is told after each `recompute`."""
        self._fleet, self._strict, self._changed = fleet, strict, changed
        self.by_name: dict[str, Known] = {}
        self._serving: dict[str, frozenset[str] | None] = {}
        self._unlisted: frozenset[str] | None = None
        """What `serving` says of a model that nobody lists."""
        self.open: frozenset[str] = frozenset()
        """Workers that may serve any model."""
        self.partial: tuple[str, ...] = ()
        """The models that not every worker serves that takes turns."""
        self._prefilling: dict[str, frozenset[str]] = {}
        """As `prefilling` says, of models that not all of those serve."""
        self._choices: dict[str, frozenset[frozenset[str] | None]] = {}
        """As `choices_with` says, of workers that do not serve just what all do."""

    # -- what turns ask

    def serving(self, model: str) -> frozenset[str] | None:
        """The names of the workers that may be given turns for a model; None: all. Nothing in it: nobody is known
        to, ask `learn`."""
        return self._serving.get(model, self._unlisted)

    def prefilling(self, model: str) -> frozenset[str] | None:
        """The names of the workers that may prefill for a model, and take no turns; None: all that there are."""
        return self._prefilling.get(model)

    @property
    def partly_prefilled(self) -> tuple[str, ...]:
        return tuple(self._prefilling)

    def lists(self, model: str) -> bool:
        """Somebody lists it, or did."""
        return model in self._serving

    def choices_with(self, name: str) -> frozenset[frozenset[str] | None]:
        """Of a worker: for its models, the names of the workers that serve each (None: all)."""
        return self._choices.get(name, _EVERYBODY)

    # -- what lists are made of

    def entries(self) -> dict[str, msgspec.Raw] | None:
        """Id → entry of all models of the fleet, each once, in the workers' order; None: no list is known."""
        merged: dict[str, msgspec.Raw] = {}
        known = False
        for worker in self._fleet:
            entries = self._entries_of(worker)
            if entries is not None:
                known = True
                for name, entry in entries.items():
                    merged.setdefault(name, entry)
        return merged if known else None

    def models_of(self, name: str) -> tuple[str, ...] | None:
        """Of a worker; None: its list is not known."""
        worker = self._fleet.worker(name)
        entries = None if worker is None else self._entries_of(worker)
        return None if entries is None else tuple(entries)

    def adapter(self, worker: Worker, model: str) -> str | None:
        """Of a model at a worker: the adapter that it is; empty: it is the worker's own; None: that is not known."""
        known = self.by_name.get(worker.name)
        if known is None or not known.entries:
            return None
        if not model:
            return ""  # whoever names none means the worker's own
        entry = known.entries.get(model)
        if entry is None:
            return None
        try:
            parent = _read_parent(entry).parent
        except msgspec.DecodeError:
            return None
        if parent is msgspec.UNSET:  # it does not say: the only one is its own
            return "" if len(known.entries) == 1 else None
        return "" if parent is None else model

    def refused(self) -> list[Worker]:
        """The workers whose lists are shown to clients' own keys only."""
        return [worker for worker in self._fleet if (known := self.by_name.get(worker.name)) and known.refused]

    def _entries_of(self, worker: Worker) -> dict[str, msgspec.Raw] | None:
        known = self.by_name.get(worker.name)
        if known is not None and known.entries is not None:
            return known.entries
        if worker.spec is not None and worker.spec.models:  # as it was registered
            return {name: entry_of(name) for name in worker.spec.models}
        return None

    # -- what changes

    def of(self, worker: Worker) -> Known:
        known = self.by_name.get(worker.name)
        if known is None:
            known = self.by_name[worker.name] = Known()
        if known.worker is not worker:  # another one has come under the name
            known.worker, known.due, known.was_up, known.refused = worker, 0.0, False, False
            known.asked = known.entries is not None
        return known

    def note(self, name: str, known: Known, entries: dict[str, msgspec.Raw]) -> None:
        """This is its list."""
        before = known.entries
        first = not known.asked or before is None
        known.entries, known.asked = entries, True
        if before is not None and before.keys() != entries.keys():
            come, gone = entries.keys() - before.keys(), before.keys() - entries.keys()
            said = [f"{word} {_some(names)}" for word, names in (("now serves", come), ("no longer", gone)) if names]
            log.info("worker %s %s", name, ", ".join(said))
        if first or before is None or before.keys() != entries.keys():
            self.recompute()

    def recompute(self) -> None:
        """Make what turns look up. Awaits nothing."""
        workers = list(self._fleet)
        lists = {worker.name: entries for worker in workers if (entries := self._entries_of(worker)) is not None}
        prefilling = {worker.name for worker in workers if not worker.takes_turns}
        gone = [known.entries for name, known in self.by_name.items() if name not in lists and known.entries]
        unlisted = frozenset(each.name for each in workers if each.name not in lists and self.of(each).asked)
        self.open = unlisted - prefilling
        serving: dict[str, set[str]] = {}
        for name, entries in lists.items():
            for model in entries:
                serving.setdefault(model, set()).add(name)
        for entries in gone:
            for model in entries:
                serving.setdefault(model, set())
        everybody = len(workers) - len(prefilling)
        prefills = frozenset(prefilling)
        self._prefilling = {
            model: found for model, names in serving.items() if (found := prefills & (names | unlisted)) != prefills
        }
        made = {model: frozenset(names | unlisted) - prefills for model, names in serving.items()}
        self.partial = tuple(model for model, names in made.items() if len(names) < everybody)
        self._serving = {
            model: None if everybody and len(names) == everybody else names for model, names in made.items()
        }
        nothing_known = not lists and not gone
        self._unlisted = None if nothing_known or not self._strict else frozenset()
        self._choices = self._made_choices(made) if self.partial else {}
        self._changed()

    def _made_choices(self, made: dict[str, frozenset[str]]) -> dict[str, frozenset[frozenset[str] | None]]:
        choices: dict[str, set[frozenset[str] | None]] = {}
        for model, names in made.items():
            for name in names:
                choices.setdefault(name, set()).add(self._serving[model])
        return {name: frozenset(each) for name, each in choices.items()}

    def prune(self, now: float) -> list[str]:
        """Forget what workers served that have left long ago (`now`: Unix seconds). Returns of which there are
        records."""
        recorded = []
        for name, known in list(self.by_name.items()):
            if self._fleet.worker(name) is not None:
                known.left_at = 0.0
            elif not known.left_at:
                known.left_at = now
            elif max(known.left_at, known.recorded_at) < now - _KEPT_FOR:
                del self.by_name[name]
                if known.recorded is not None:
                    recorded.append(name)
        self.recompute()
        return recorded


class _Parent(msgspec.Struct):
    parent: str | msgspec.UnsetType | None = msgspec.UNSET
    """Of an adapter, the model that it adapts."""


_read_parent = msgspec.json.Decoder(_Parent).decode


def entry_of(model: str) -> msgspec.Raw:
    """Of a model whose worker's own is not known."""
    return msgspec.Raw(_encode({"id": model, "object": "model"}))


def _some(names: Iterable[str]) -> str:
    told = sorted(names)
    more = len(told) - _MOST_NAMES_TOLD
    return ", ".join(map(shown, told[:_MOST_NAMES_TOLD])) + (f" and {more} more" if more > 0 else "")


def shown(model: str) -> str:
    return repr(short(model))


def short(model: str) -> str:
    return model if len(model) <= _LONGEST_TOLD else model[:_LONGEST_TOLD] + "..."
