"""Listens to the sources of workers, and keeps what each of them said last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from app.fleet.discovery.source import Said, Source, Trouble, View
from app.fleet.specs import WorkerSpec
from app.logs import event

log = logging.getLogger("coatcheck.fleet")


class Told:
    """Warnings that are told once while what they say stands."""

    def __init__(self) -> None:
        self._by_kind: dict[str, frozenset[str]] = {}

    def now(self, kind: str, lines: Iterable[str]) -> None:
        """All that stands of a kind."""
        standing = frozenset(lines)
        for line in sorted(standing - self._by_kind.get(kind, frozenset())):
            log.warning("%s", line)
        self._by_kind[kind] = standing


class Listening(msgspec.Struct, eq=False):
    """What is known of one source."""

    source: Source
    view: View = View(())
    trouble: str = ""
    """Why it says nothing now; the last view stands."""
    heard: bool = False
    task: asyncio.Task[None] | None = None


class Listener:
    """All sources, in the order in which they decide."""

    def __init__(self, changed: Callable[[], None], told: Told) -> None:
        """`changed` is called when a source has said something."""
        self._changed, self._told = changed, told
        self._by_label: dict[str, Listening] = {}
        self._heard = asyncio.Event()

    def __iter__(self) -> Iterator[Listening]:
        return iter(self._by_label.values())

    def __len__(self) -> int:
        return len(self._by_label)

    def begin(self, sources: Sequence[Source]) -> None:
        """Listen to these too, inside the running loop."""
        for source in sources:
            each = self._by_label[source.label] = Listening(source)
            each.task = asyncio.create_task(self._hear(each))

    async def keep(self, labels: Sequence[str]) -> None:
        """Listen to these only, those there are of them, and in that order."""
        dropped = [each for label, each in self._by_label.items() if label not in labels]
        self._by_label = {label: self._by_label[label] for label in labels if label in self._by_label}
        await end_tasks(each.task for each in dropped)
        for each in dropped:
            await each.source.aclose()

    async def wait(self) -> None:
        """Until each has said something."""
        while not all(each.heard for each in self):
            self._heard.clear()
            await self._heard.wait()

    def look(self) -> None:
        """Have all asked at once."""
        for each in self:
            each.source.look()

    def named(self) -> Iterator[tuple[str, tuple[WorkerSpec, ...]]]:
        """What each says, by its label."""
        return ((label, each.view.workers) for label, each in self._by_label.items())

    async def _hear(self, each: Listening) -> None:
        label = each.source.label
        try:
            async for said in each.source.says():
                self._note(each, said)
        except Exception:  # a fault of ours: the operator sees it in the log, and the last view stands
            log.exception("workers from %s: the source has failed and is not asked again", label)
            each.trouble = "it has failed; the log has the reason"

    def _note(self, each: Listening, said: Said) -> None:
        label = each.source.label
        each.heard = True
        self._heard.set()
        trouble = said.why if isinstance(said, Trouble) else ""
        if isinstance(said, View):
            if said.workers or said.emptied:
                each.view = said
            else:
                trouble = "it names no worker" if each.view.workers else "it names no worker yet"
        if trouble != each.trouble:
            each.trouble = trouble
            count = len(each.view.workers)
            if trouble:
                news = event("source_silent", source=label, reason=trouble, workers=count)
                text = "workers from %s: %s; the last view stands, with %d workers"
                log.warning(text, label, trouble, count, extra=news)
            else:
                news = event("source_back", source=label, workers=count)
                log.warning("workers from %s: all is well again, with %d workers", label, count, extra=news)
        self._told.now(label, (f"{label} says what cannot be used: {why}" for why in each.view.refused))
        self._changed()


async def end_tasks(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Cancelled, and ended on return."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
