"""In which order the processes of a parallel run take the tests.

xdist cuts the list into as many parts as there are processes. Whoever is done takes the second half of the longest part
that is left, and so on. Hence what takes long begins each part, since at the end others would wait for it; and modules
that start the same (processes, etcd servers, client libraries) are in one part, which starts it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

TOGETHER: Sequence[dict[str, int]] = (
    # openai's and anthropic's libraries, and the standing replicas
    {
        "e2e/test_affinity.py": 60,
        "e2e/test_streaming.py": 78,
        "e2e/test_apis.py": 32,
        "e2e/test_openai.py": 25,
        "e2e/test_disconnects.py": 23,
        "e2e/test_listening.py": 37,
        "e2e/test_capacity.py": 24,
        "unit/test_mocker_apis.py": 95,
        "unit/test_mocker.py": 53,
    },
    # Servers of each series of etcd
    {
        "stores/test_etcd.py": 208,
        "stores/test_conformance.py": 240,
        "stores/test_registry.py": 125,
        "stores/test_registry_etcd.py": 32,
    },
    {"e2e/test_history.py": 79},
    {"e2e/test_discovery.py": 165},
    {"e2e/test_up.py": 150},
    {"e2e/test_sick.py": 102},
    {"e2e/test_serve.py": 89},
    {"e2e/test_replicas.py": 80},
    {"e2e/test_phases.py": 71},
    {"unit/test_benchmarks.py": 63},
    {"e2e/test_deploy.py": 56},
    {"e2e/test_worker_loss.py": 56},
    {"e2e/test_placement.py": 46},
    {"e2e/test_admin.py": 45},
    {"e2e/test_serving.py": 44},
    {"e2e/test_fronts.py": 32},
    {"e2e/test_wire_memory.py": 32},
    {"e2e/test_demo.py": 31},
)
"""What is in one part, by how long it takes, in seconds of a busy machine. Nothing but the order hangs on them."""


def dealt(modules: Sequence[str], parts: int) -> list[int]:
    """The numbers of the tests, which are of these `modules`. Each of `parts` begins with some of `TOGETHER`."""
    sizes = [(len(modules) + number) // parts for number in range(parts)]  # as xdist cuts
    tests: defaultdict[str, list[int]] = defaultdict(list)
    for number, module in enumerate(modules):
        tests[module.removeprefix("tests/")].append(number)
    begun: list[list[int]] = [[] for _ in range(parts)]
    seconds = [0] * parts
    for group in sorted(TOGETHER, key=lambda group: -sum(group.values())):
        numbers = [number for module in group for number in tests.get(module, ())]
        least = min(range(parts), key=seconds.__getitem__)
        if len(begun[least]) + len(numbers) <= sizes[least]:
            begun[least] += numbers
            seconds[least] += sum(group.values())
    placed = {number for part in begun for number in part}
    others = iter([number for number in range(len(modules)) if number not in placed])
    for part, size in zip(begun, sizes, strict=True):
        part += [next(others) for _ in range(size - len(part))]
    return [number for part in begun for number in part]
