"""What Linux knows of processes: their CPU time, memory, descriptors and sockets; and how busy the machine is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_ESTABLISHED = "01"


def tree(root: int) -> list[int]:
    """The process and all its descendants."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                waiting += map(int, children.read_text().split())
    return found


@dataclass(frozen=True)
class Cpu:
    """CPU time of some processes until now."""

    threads_s: float
    """Of the threads that live, by the scheduler's clock, in nanoseconds."""
    processes_s: float
    """Of threads that have ended as well, in ticks of 10 ms."""

    def since(self, earlier: Cpu) -> float:
        """Seconds. The exact number, unless threads have ended meanwhile, whose time it no longer has."""
        exact, coarse = self.threads_s - earlier.threads_s, self.processes_s - earlier.processes_s
        return coarse if coarse - exact > 2 * _TICK_S + 0.02 * coarse else exact


def cpu(pids: Iterable[int]) -> Cpu:
    threads = processes = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            processes += (int(fields[11]) + int(fields[12])) * _TICK_S
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    threads += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0]) / 1e9
    return Cpu(threads, processes)


def resident(pids: Iterable[int]) -> int:
    """Bytes; what processes share counts for each of them."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def established(pid: int) -> int:
    """Its TCP connections that are open at both ends."""
    ours = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                ours.add(target[8:-1])
    count = 0
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = (line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:])
            count += sum(row[3] == _ESTABLISHED and row[9] in ours for row in rows)
    return count


@dataclass(frozen=True)
class Machine:
    """CPU time of the whole machine until now, in seconds over all cores."""

    busy_s: float
    idle_s: float


def machine() -> Machine:
    with open("/proc/stat") as stat:
        times = [int(field) * _TICK_S for field in stat.readline().split()[1:9]]
    idle = times[3] + times[4]
    return Machine(sum(times) - idle, idle)
