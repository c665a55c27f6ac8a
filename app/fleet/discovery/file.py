"""Workers from a TOML file, which is looked at twice a second: events do not come from every file system, and an
editor, a ConfigMap or a rename change it in as many ways.

```toml
worker = ["http://10.0.0.5:8000,name=a", "http://10.0.0.6:8000"]     # as --worker has them, or:

[[worker]]
url = "http://10.0.0.7:8000"
name = "c"                    # the rest may be left out
dp = 4
draining = false
incarnation = "2"
models = ["qwen3-8b"]
labels = { zone = "a" }
```

A file that is being written is left alone until it stands still for one look; one that cannot be read whole changes
nothing.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from app.fleet.discovery.source import Aside, Pace, Said, Trouble, View, asked_again
from app.fleet.specs import (
    BOOTSTRAP_PORT,
    HANDOVERS,
    Described,
    Handover,
    Phase,
    WorkerError,
    WorkerSpec,
    checked_ranks,
    worker_spec,
)

_EVERY = 0.5
"""Seconds."""
_MOST_BYTES = 8 << 20

_Stamp = tuple[int, int, int]


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    name: str | None = None
    dp: int | None = None
    phase: Phase = "both"
    handover: Handover = HANDOVERS[0]
    bootstrap_port: int = msgspec.field(default=BOOTSTRAP_PORT, name="bootstrap-port")
    draining: bool = False
    incarnation: str = ""
    kv_events: str = msgspec.field(default="", name="kv-events")
    kv_replay: str = msgspec.field(default="", name="kv-replay")
    models: tuple[str, ...] = ()
    labels: dict[str, str] = {}


class FileSource:
    """See the module's docstring."""

    def __init__(self, path: Path, *, every: float = _EVERY) -> None:
        self.label = path.as_uri()
        self._path = path
        self._pace = Pace(every)
        self._aside = Aside("workers-file")
        self._seen: _Stamp | None = None
        self._read: _Stamp | None = None
        """Of what was said last; None: nothing yet, or a trouble."""
        self._first = True

    def says(self) -> AsyncIterator[Said]:
        return asked_again(self._pace, self._look)

    def look(self) -> None:
        self._pace.hurry()

    async def aclose(self) -> None:
        pass

    async def _look(self) -> Said | None:
        try:
            stamp = await self._aside.run(self._stamp)
            stands = stamp == self._seen or self._first
            self._seen, self._first = stamp, False
            if stamp == self._read or not stands:
                return None
            text = await self._aside.run(self._text)
            self._read = stamp
            return View(read_workers(text))
        except TimeoutError:
            self._read = None
            return Trouble("it cannot be read (no answer from the file system)")
        except OSError as error:
            self._read = None
            return Trouble(f"it cannot be read ({error.strerror})")
        except ValueError as error:
            return Trouble(str(error))

    def _stamp(self) -> _Stamp:
        found = self._path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _text(self) -> str:
        with self._path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"it is longer than {_MOST_BYTES} bytes")
        return raw.decode()


def read_workers(text: str) -> tuple[WorkerSpec, ...]:
    """Raises ValueError, which says the line."""
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WorkerError(told_with_line(error, text)) from None
    unknown = [key for key in said if key != "worker"]
    if unknown:
        raise ValueError(f"line {_line_of_key(text, unknown[0])}: there is nothing called {unknown[0]!r}; write worker")
    entries = said.get("worker", [])
    if not isinstance(entries, list):
        line = _line_of_key(text, "worker")
        raise WorkerError(f"line {line}: worker is a list, or write tables [[worker]]")
    specs: dict[str, WorkerSpec] = {}
    urls: set[str] = set()
    for number, entry in enumerate(entries):
        try:
            spec = _spec(entry)
            if spec.name in specs:
                raise WorkerError(f"two workers are called {spec.name!r}; give one another name")
            if spec.url in urls:
                raise WorkerError(f"{spec.url} is there twice; remove one")
        except ValueError as error:  # msgspec's, and WorkerError
            raise ValueError(f"line {_line_of_entry(text, number, entry)}: {error}") from None
        specs[spec.name] = spec
        urls.add(spec.url)
    return tuple(specs.values())


def told_with_line(error: tomllib.TOMLDecodeError, text: str) -> str:
    """What is wrong with a TOML text, in one line, with its line also where that is the last one."""
    return str(error).replace("at end of document", f"at the end, line {text.rstrip().count(chr(10)) + 1}")


def _spec(entry: Any) -> WorkerSpec:
    """Raises ValueError."""
    if isinstance(entry, str):
        return worker_spec(entry)
    table = msgspec.convert(entry, _Table)
    return Described(
        url=table.url,
        ranks=0 if table.dp is None else checked_ranks(table.dp),
        phase=table.phase,
        handover=table.handover,
        bootstrap_port=table.bootstrap_port,
        draining=table.draining,
        incarnation=table.incarnation,
        models=table.models,
        labels=table.labels,
        kv_events=table.kv_events,
        kv_replay=table.kv_replay,
    ).checked(table.name)


def _line_of_key(text: str, key: str) -> int:
    found = re.search(rf"""^[ \t]*(\[+[ \t]*)?["']?{re.escape(key)}\b""", text, re.MULTILINE)
    return _line_at(text, found.start() if found else 0)


def _line_of_entry(text: str, number: int, entry: Any) -> int:
    """Where the worker of that number begins: its table, or its text in the list."""
    if isinstance(entry, str):
        # Of equal ones the last: it is the one that is too many.
        return _line_at(text, max(0, text.rfind(entry)))
    heads = [found.start() for found in re.finditer(r"^[ \t]*\[\[[ \t]*[\"']?worker\b", text, re.MULTILINE)]
    return _line_at(text, heads[number] if number < len(heads) else 0)


def _line_at(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1
