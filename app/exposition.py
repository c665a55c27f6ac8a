"""Metrics as Prometheus reads them, and those of several processes as one.

Of several processes counters and distributions are sums, and so are gauges but for those whose family says otherwise.
What has been shown does not run backwards while there is somebody to count on: what a process had counted when it was
last asked still counts when it is gone, or does not answer, or tells no more of a worker that another process still
has. Once no process names a worker all its series are gone. What a process has counted since it was last asked is lost
with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from app.metrics import Family, Labels

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Scrape = Callable[[bool], Awaitable[bytes]]
"""Gives the text, as OpenMetrics or not."""
Series = tuple[str, Labels]
"""The name of a family, and the values of its labels."""


def wants_open_metrics(accept: str) -> bool:
    """Of an Accept header: whether OpenMetrics 1.0 comes in it, and is not refused. Prometheus prefers it where it
    names it."""
    for each in accept.split(","):
        media, *parameters = (part.strip().lower() for part in each.split(";"))
        if media == "application/openmetrics-text":
            said = dict(parameter.partition("=")[::2] for parameter in parameters)
            if said.get("version", "1.0.0").startswith("1.") and said.get("q", "1").strip("0.") != "":
                return True
    return False


def text(families: Iterable[Family], open_metrics: bool = False) -> bytes:
    """In the format of OpenMetrics 1.0.0, or of Prometheus 0.0.4. Each family must be there once."""
    lines: list[str] = []
    for family in families:
        sample = f"{family.name}_total" if family.kind == "counter" else family.name
        shown = family.name if open_metrics else sample
        help_ = family.text.replace("\\", "\\\\").replace("\n", "\\n")
        lines.append(f"# HELP {shown} " + (help_.replace('"', '\\"') if open_metrics else help_))
        lines.append(f"# TYPE {shown} {family.kind}")
        for values, numbers in family.cells:
            labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(family.labels, values, strict=True))
            behind = f"{{{labels}}}" if labels else ""
            if family.kind != "histogram":
                lines.append(f"{sample}{behind} {_spoken(numbers[0])}")
                continue
            before, seen = f"{labels}," if labels else "", 0.0
            for bound, count in zip((*map(repr, family.bounds), "+Inf"), numbers, strict=False):
                seen += count
                lines.append(f'{sample}_bucket{{{before}le="{bound}"}} {_spoken(seen)}')
            lines.append(f"{sample}_count{behind} {_spoken(seen)}")
            lines.append(f"{sample}_sum{behind} {_spoken(numbers[-1])}")
    if open_metrics:
        lines.append("# EOF")
    return "\n".join([*lines, ""]).encode("utf-8", "replace")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _spoken(number: float) -> str:
    if number in (float("inf"), float("-inf")):
        return "+Inf" if number > 0 else "-Inf"
    return "NaN" if number != number else repr(float(number))


class Merging:
    """The families of several processes as one's."""

    def __init__(self) -> None:
        self._last: dict[str, dict[Series, list[float]]] = {}
        """What each process has counted, as it said last."""
        self._kept: dict[Series, list[float]] = {}
        """What was counted by processes, or in series of theirs, that are no more."""

    def merge(self, said: Mapping[str, list[Family]], silent: Iterable[str] = ()) -> list[Family]:
        """`said`: by the processes that have answered; `silent`: those that have not, and are there."""
        for process in self._last.keys() - said.keys() - set(silent):
            self._keep(self._last.pop(process), {})
        for process, families in said.items():
            counted = {
                (family.name, values): numbers
                for family in families
                if family.kind != "gauge"
                for values, numbers in family.cells
            }
            self._keep(self._last.get(process, {}), counted)
            self._last[process] = counted
        return self._sum(said)

    def _keep(self, before: Mapping[Series, list[float]], now: Mapping[Series, list[float]]) -> None:
        """What a process said `before` and does not count on `now`."""
        for series, numbers in before.items():
            current = now.get(series)
            if current is None or any(new < old for new, old in zip(current, numbers, strict=True)):
                _add(self._kept, series, numbers)

    def _sum(self, said: Mapping[str, list[Family]]) -> list[Family]:
        merged: dict[str, Family] = {}
        cells: dict[Series, list[float]] = {}
        workers: set[str] = set()
        """That a process names, or named when it was last heard."""
        for families in said.values():
            for family in families:
                merged.setdefault(family.name, family)
                at = family.labels.index("worker") if "worker" in family.labels else -1
                for values, numbers in family.cells:
                    series = family.name, values
                    if at >= 0:
                        workers.add(values[at])
                    if family.kind != "gauge" or family.merge == "sum":
                        _add(cells, series, numbers)
                    else:
                        best = max if family.merge == "max" else min
                        cells[series] = [best(numbers[0], cells.get(series, numbers)[0])]
        silent = [counted for process, counted in self._last.items() if process not in said]
        for counted in silent:
            for name, values in counted:
                labelled = merged.get(name)
                if labelled is not None and "worker" in labelled.labels:
                    workers.add(values[labelled.labels.index("worker")])
        for series in [series for series in self._kept if not _is_shown(merged, series, workers)]:
            del self._kept[series]
        for counted in (*silent, self._kept):
            for series, numbers in counted.items():
                if _is_shown(merged, series, workers):
                    _add(cells, series, numbers)
        found = {name: Family(f.name, f.kind, f.text, f.labels, [], f.bounds, f.merge) for name, f in merged.items()}
        for (name, values), numbers in cells.items():
            found[name].cells.append((values, numbers))
        return list(found.values())


def _is_shown(families: Mapping[str, Family], series: Series, workers: set[str]) -> bool:
    name, values = series
    family = families.get(name)
    return family is not None and ("worker" not in family.labels or values[family.labels.index("worker")] in workers)


def _add(sums: dict[Series, list[float]], series: Series, numbers: list[float]) -> None:
    there = sums.get(series)
    sums[series] = list(numbers) if there is None else [a + b for a, b in zip(there, numbers, strict=True)]
