"""What other replicas mean by a worker's name. Names should agree everywhere; where they do not, a claim that another
replica has made is still served at the worker that it means, if that is one of ours, instead of being moved."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from urllib.parse import urlsplit

import msgspec

from app.fleet.workers import Fleet, Target, Worker

_AT_ONCE = 100
"""Names that are gone through in one piece: some tenths of a millisecond."""
_LOOPBACK = ("localhost", "::1")
_MAY_BE_LOOPBACK = re.compile(r"localhost|::1|127\.", re.IGNORECASE).search


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a replica says that a worker is, and how many data-parallel ranks it has (0: ranks mean nothing to it)."""

    url: str
    ranks: int = 0


class Spot(msgspec.Struct, frozen=True, omit_defaults=True):
    """A target, as one replica describes it to another."""

    worker: str
    url: str
    rank: int | None = None
    ranks: int = 0
    """Of the worker."""
    network: str = ""
    """Names the network that the replica's loopback is of."""


def address_of(url: str, network: str) -> str:
    """A worker's URL, one spelling for all of a loopback's; `network` names what that loopback is of."""
    if not _MAY_BE_LOOPBACK(url):  # taking one apart is ten times as long, and a fleet has many
        return url
    parts = urlsplit(url)
    name = (parts.hostname or "").rstrip(".")
    if name in _LOOPBACK or name.startswith("127."):
        return f"{parts.scheme}://loopback@{network}:{parts.port}{parts.path}"
    return url


class Naming:
    """The fleet's targets by what claims call them. While all replicas agree that is the fleet's own names, at no
    cost."""

    def __init__(self, fleet: Fleet, network: str = "") -> None:
        """`network` names what this replica's loopback is of."""
        self._fleet, self._network = fleet, network
        self._meant: dict[tuple[str, str], Place] = {}
        """By replica and name: what differs from ours, or is not here under that name."""
        self._elsewhere: dict[str, Place] = {}
        """By name alone, for claims whose maker is gone."""
        self._made: dict[tuple[str, int | None], Target] = {}
        """Targets that only others know: a rank of a worker of ours, or the whole of one that has ranks here."""

    def learn(self, replicas: Mapping[str, tuple[str, Mapping[str, Place]]]) -> Generator[None, None, None]:
        """What all others say now: for each replica the network of its loopback, and its workers by their names. In
        pieces, after each of which others may work; until the last one what was learnt before stands."""
        ours: dict[str, Worker] = {}
        for at, worker in enumerate(list(self._fleet), 1):
            ours[address_of(worker.url, self._network)] = worker
            if at % _AT_ONCE == 0:
                yield
        meant: dict[tuple[str, str], Place] = {}
        elsewhere: dict[str, Place] = {}
        for replica, (network, workers) in replicas.items():
            for at, (name, place) in enumerate(workers.items(), 1):
                if at % _AT_ONCE == 0:
                    yield
                here = self._fleet.worker(name)
                address = address_of(place.url, network)
                if here is not None and place.ranks == _ranks(here) and address == address_of(here.url, self._network):
                    continue
                same = ours.get(address)
                if same is None:
                    continue
                meant[replica, name] = local = Place(same.url, place.ranks)
                if here is None:
                    elsewhere[name] = local
        self._meant, self._elsewhere = meant, elsewhere
        if not meant:
            self._made.clear()

    def find(self, name: str, rank: int | None, replica: str = "") -> Target | None:
        """The target that a claim of `replica` means; None: it is not in this fleet."""
        if not self._meant:
            return self._fleet.find(name, rank)
        place = self._meant.get((replica, name)) or self._elsewhere.get(name)
        if place is None:
            return self._fleet.find(name, rank)
        worker = next((worker for worker in self._fleet if worker.url == place.url), None)
        if worker is None:
            return self._fleet.find(name, rank)
        return self._target(worker, rank, place.ranks)

    def spot(self, target: Target) -> Spot:
        place = place_of(target.worker)
        return Spot(target.worker.name, place.url, target.rank, place.ranks, self._network)

    def at(self, spot: Spot) -> Target | None:
        """The target that a peer describes; None: it is not in this fleet."""
        worker = self.there(spot)
        if worker is None:
            return self._fleet.find(spot.worker, spot.rank)
        return self._target(worker, spot.rank, spot.ranks)

    def there(self, spot: Spot) -> Worker | None:
        """The worker at the address that a peer describes, whatever it is called here; None: nobody is."""
        worker = self._fleet.worker(spot.worker)
        wanted = address_of(spot.url, spot.network)
        if worker is None or address_of(worker.url, self._network) != wanted:
            here = (each for each in self._fleet if address_of(each.url, self._network) == wanted)
            worker = next(here, None)
        return worker

    def _target(self, worker: Worker, rank: int | None, ranks: int) -> Target | None:
        for target in worker.targets:
            if target.rank == rank:
                return target
        if rank is not None and rank >= ranks:
            return None
        made = self._made.get((worker.name, rank))
        if made is None or made.worker is not worker:
            made = self._made[worker.name, rank] = Target(worker, rank)
        return made


def _ranks(worker: Worker) -> int:
    return sum(target.rank is not None for target in worker.targets)


def place_of(worker: Worker) -> Place:
    return Place(worker.url, _ranks(worker))
