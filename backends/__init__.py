"""Claim stores: where the record "this session is at that worker" lives. One URL each.

| URL | several processes | several hosts | survives restarts | linearizable | stamps |
|---|---|---|---|---|---|
| `memory://` | no | no | no | yes | yes |
| `file:///dir` | yes | no | yes | yes | yes |
| `file:///dir?hosts=many` | yes | yes | yes | no: network file systems cache | no |
| `etcd://host:2379/prefix` | yes | yes | yes | yes | no |

`backends.base` is the contract. Each store's module says in its first paragraph what it does not promise.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from backends.base import (
    LIFETIME,
    Claim,
    ClaimLost,
    ClaimOutcome,
    ClaimStore,
    ClaimValue,
    CloseOutcome,
    Deleted,
    Event,
    Guarantee,
    OutcomeUnknown,
    Reset,
    StoreConfigurationError,
    StoreError,
    StoreUnavailable,
)

__all__ = [
    "LIFETIME",
    "Claim",
    "ClaimLost",
    "ClaimOutcome",
    "ClaimStore",
    "ClaimValue",
    "CloseOutcome",
    "Deleted",
    "Event",
    "Guarantee",
    "OutcomeUnknown",
    "Reset",
    "StoreConfigurationError",
    "StoreError",
    "StoreUnavailable",
    "open_store",
]


async def open_store(
    url: str, *, need: Guarantee = Guarantee.NONE, deadline: float = 2.0, capacity: int = 1_000_000
) -> ClaimStore:
    """Opens the store that `url` names; the caller closes it with `aclose`. A store that is merely away for now is no
    error here: ask its `check`.

    `need`: what the deployment requires; `deadline`: the most seconds that one call may take; `capacity`: the most
    claims a memory store holds. Raises StoreConfigurationError, whose message says what to change."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreConfigurationError(f"the claims URL cannot be read ({error}); {_URLS}") from None
    if parts.scheme == "memory":
        store = _open_memory(parts, capacity)
    elif parts.scheme == "file":
        store = await _open_file(parts, deadline)
    elif parts.scheme == "etcd":
        from backends.etcd.store import EtcdStore  # imports grpc, which the other stores need not pay for

        store = await EtcdStore.open(url, deadline=deadline)
    else:
        raise StoreConfigurationError(f"the claims URL {_shown(parts)!r} is of no known kind; {_URLS}")
    lacking = need & ~store.guarantees
    if lacking:
        await store.aclose()
        names = ", ".join(str(flag.name).lower().replace("_", " ") for flag in lacking)
        raise StoreConfigurationError(
            f"this deployment needs claims to be {names}, and {_shown(parts)!r} is not; {_remedy(lacking)}"
        )
    return store


_URLS = "use memory://, file:///folder, or etcd://host:2379/prefix"


def _open_memory(parts: SplitResult, capacity: int) -> ClaimStore:
    from backends.memory import MemoryStore

    if parts.netloc or parts.path.strip("/"):
        raise StoreConfigurationError(f"{_shown(parts)!r}: the memory store has no host and no path; write memory://")
    _options(parts, {})
    return MemoryStore(capacity=capacity)


async def _open_file(parts: SplitResult, deadline: float) -> ClaimStore:
    from backends.file import FileStore

    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise StoreConfigurationError(
            f"{_shown(parts)!r} names no absolute folder; write three slashes: file:///var/lib/coatcheck"
        )
    folder = Path(unquote(parts.path))
    if folder == Path("/"):
        raise StoreConfigurationError(f"{_shown(parts)!r} is the root of the machine; name a folder of its own")
    options = _options(parts, {"hosts": ("one", "many"), "sync": ("yes", "no")})
    return await FileStore.open(
        folder, deadline=deadline, shared=options.get("hosts") == "many", sync=options.get("sync") != "no"
    )


def _options(parts: SplitResult, known: dict[str, tuple[str, ...]]) -> dict[str, str]:
    if parts.fragment:
        raise StoreConfigurationError(f"{_shown(parts)!r} has a #fragment, which means nothing here; write %23 for #")
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            choice = f"known: {', '.join(known)}" if known else "it has none"
            raise StoreConfigurationError(f"{_shown(parts)!r} has no option {name!r}; {choice}")
        if name in options:
            raise StoreConfigurationError(f"{_shown(parts)!r}: option {name!r} is given twice; give it once")
        if value not in known[name]:
            raise StoreConfigurationError(
                f"{_shown(parts)!r}: option {name!r} is {value!r}; it may be {' or '.join(known[name])}"
            )
        options[name] = value
    return options


def _shown(parts: SplitResult) -> str:
    """The URL without what may be secret: user, password, and the values of options."""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _remedy(lacking: Guarantee) -> str:
    if Guarantee.ACROSS_HOSTS in lacking:
        return "use etcd://host:2379/prefix, or file:///folder?hosts=many on a share"
    if Guarantee.LINEARIZABLE in lacking:
        return "use etcd://host:2379/prefix, or file:///folder on one host"
    return "use file:///folder or etcd://host:2379/prefix"
