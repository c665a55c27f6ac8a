"""Claim stores: where the record "this session is at that worker" lives. One URL each.

| URL | several processes | several hosts | survives restarts | linearizable | stamps |
|---|---|---|---|---|---|
| `memory://` | no | no | no | yes | yes |
| `file:///dir` | yes | no | yes | yes | yes |
| `file:///dir?hosts=many` | yes | yes | yes | no: network file systems cache | no |
| `etcd://host:2379/prefix` | yes | yes | yes | yes | no |

Serving with several processes is refused where they would not agree; the rest is for people to choose by.
Each also keeps the registry, small records that replicas, workers and operators tell each other; they reach as far as
the claims and survive what the claims survive.

`backends.base` is the contract, `backends.registry` that of the records. Each store's module says in its first
paragraph what it does not promise.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from backends.base import ClaimStore, StoreConfigurationError
from backends.options import parse_options, shown


async def open_store(
    url: str, *, across_processes: bool = False, deadline: float = 2.0, capacity: int = 1_000_000
) -> ClaimStore:
    """Opens the store that `url` names; the caller closes it with `aclose`. A store that is away at the moment is no
    error here: ask its `check`.

    `across_processes`: this deployment has several processes, which must agree; `deadline`: the most seconds that one
    call may take; `capacity`: the most claims a memory store holds. Raises StoreConfigurationError, whose message says
    what to change."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreConfigurationError(f"the claims URL cannot be read ({error}); {_URLS}") from None
    if parts.scheme == "memory":
        store = _open_memory(url, parts, capacity)
    elif parts.scheme == "file":
        store = await _open_file(url, parts, deadline)
    elif parts.scheme == "etcd":
        from backends.etcd.store import EtcdStore  # imports grpc, which the other stores need not pay for

        store = await EtcdStore.open(url, deadline=deadline)
    else:
        raise StoreConfigurationError(f"the claims URL {shown(url)!r} is of no known kind; {_URLS}")
    if across_processes and not store.across_processes:
        await store.aclose()
        raise StoreConfigurationError(
            f"this deployment needs claims to be the same across processes, and {shown(url)!r} is not; "
            "use file:///folder or etcd://host:2379/prefix"
        )
    return store


_URLS = "use memory://, file:///folder, or etcd://host:2379/prefix"


def _open_memory(url: str, parts: SplitResult, capacity: int) -> ClaimStore:
    from backends.memory import MemoryStore

    if parts.netloc or parts.path.strip("/"):
        raise StoreConfigurationError(f"{shown(url)!r}: the memory store has no host and no path; write memory://")
    _options(url, parts, {})
    return MemoryStore(capacity=capacity)


async def _open_file(url: str, parts: SplitResult, deadline: float) -> ClaimStore:
    from backends.file import FileStore

    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise StoreConfigurationError(
            f"{shown(url)!r} names no absolute folder; write three slashes: file:///var/lib/coatcheck"
        )
    folder = Path(unquote(parts.path))
    if folder == Path("/"):
        raise StoreConfigurationError(f"{shown(url)!r} is the root of the machine; name a folder of its own")
    options = _options(url, parts, {"hosts": ("one", "many"), "sync": ("yes", "no")})
    return await FileStore.open(
        folder, deadline=deadline, shared=options.get("hosts") == "many", sync=options.get("sync") != "no"
    )


def _options(url: str, parts: SplitResult, known: dict[str, tuple[str, ...]]) -> dict[str, str]:
    if parts.fragment:
        raise StoreConfigurationError(f"{shown(url)!r} has a #fragment, which means nothing here; write %23 for #")
    return parse_options(url, parts.query, known)
