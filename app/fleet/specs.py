"""Workers as whoever names them describes them, and what is wrong with such a description."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec

Phase = Literal["both", "prefill", "decode"]
"""What a worker does of a turn: all of it; its prompt, for another one; or the rest, of a prompt that another one has
computed, or of one that is little work."""
PHASES: tuple[Phase, ...] = get_args(Phase)
Handover = Literal["vllm", "sglang"]
"""How a worker that has a phase gives a prompt to another one, or takes it from there: as whose engines do it."""
HANDOVERS: tuple[Handover, ...] = get_args(Handover)
BOOTSTRAP_PORT = 8998
"""SGLang's default."""

_place = re.compile(
    r"tcp://(?:\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[A-Za-z0-9][A-Za-z0-9._-]*):0*([1-9][0-9]{0,4})", re.ASCII
).fullmatch


class WorkerError(ValueError):
    """A worker was described wrongly; the message names what and the remedy."""


def worker_name(url: str) -> str:
    """The name of a worker that was not given one: opaque, so that addresses do not leak, and the same on every
    replica that is given the same URL."""
    return "w-" + hashlib.blake2b(normal_url(url).encode(), digest_size=5, person=b"coatcheck-worker").hexdigest()


def normal_url(url: str) -> str:
    """Scheme, host, port and path of a worker's URL in one spelling. Raises WorkerError."""
    remedy = "write it as http://host:port or https://host:port"
    try:
        parts = urlsplit(url.strip())
    except ValueError as error:
        raise WorkerError(f"worker {url!r}: {error}; {remedy}") from error
    if parts.scheme not in ("http", "https"):
        raise WorkerError(f"worker {url!r} has no http or https scheme; {remedy}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise WorkerError(f"worker {url!r}: {error}; {remedy}") from error
    if not host:
        raise WorkerError(f"worker {url!r} names no host; {remedy}")
    if parts.query or parts.fragment or parts.username is not None:
        raise WorkerError(f"worker {url!r} has a query, a fragment or a user in it; {remedy}")
    shown = f"[{host}]" if ":" in host else host
    # People paste OpenAI base URLs; turns bring their own /v1.
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{shown}:{port or (443 if parts.scheme == 'https' else 80)}{path}"


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """What may be said of a worker, by whoever names it."""

    url: str
    ranks: int = 0
    """Data-parallel ranks; 0: ranks mean nothing to it."""
    phase: str = "both"
    handover: str = HANDOVERS[0]
    bootstrap_port: int = BOOTSTRAP_PORT
    """Where an SGLang that prefills is met by those that decode."""
    models: tuple[str, ...] = ()
    """What it says it serves."""
    labels: dict[str, str] = {}
    incarnation: str = ""
    """Changes when its cache is lost; empty: not said."""
    draining: bool = False
    """It asks for no new sessions."""
    until: float = 0.0
    """When it is draining: when its sessions move, in Unix seconds; 0: not said."""
    kv_events: str = ""
    """Where its first rank publishes what becomes of its cache, as tcp://host:port; empty: nowhere."""
    kv_replay: str = ""
    """Where it says again what was missed of that."""

    def checked(self, name: str | None = None) -> WorkerSpec:
        """None: it has been given no name. Raises WorkerError."""
        url = normal_url(self.url)
        return WorkerSpec(
            name=worker_name(url) if name is None else checked_name(name),
            url=url,
            ranks=checked_ranks(self.ranks) if self.ranks else 0,
            phase=checked_phase(self.phase),
            handover=checked_handover(self.handover),
            bootstrap_port=checked_port(self.bootstrap_port),
            models=self.models,
            labels=self.labels,
            incarnation=self.incarnation,
            draining=self.draining,
            until=self.until,
            kv_events=checked_place(self.kv_events) if self.kv_events else "",
            kv_replay=checked_place(self.kv_replay) if self.kv_replay else "",
        )


class WorkerSpec(Described, frozen=True, kw_only=True):
    """A worker as the fleet has it; its URL is in the one spelling (`normal_url`)."""

    name: str
    phase: Phase = "both"
    handover: Handover = HANDOVERS[0]
    tls_name: str = ""
    """Whose certificate an https worker shows; empty: that of the URL's host."""

    def is_another(self, other: WorkerSpec) -> bool:
        """What was known of the other one is not true of it: it is elsewhere, or its cache is lost."""
        mine, others = (
            (each.url, each.ranks, each.tls_name, each.phase, each.handover, each.bootstrap_port)
            for each in (self, other)
        )
        return mine != others or self.is_colder(other)

    def is_colder(self, other: WorkerSpec) -> bool:
        return bool(self.incarnation and other.incarnation and self.incarnation != other.incarnation)


def checked_name(name: str) -> str:
    """Raises WorkerError."""
    if not name or len(name) > 64 or not all(0x21 <= ord(c) <= 0x7E for c in name):
        raise WorkerError(f"worker {name!r}: a name is 1 to 64 visible ASCII characters without spaces")
    return name


def checked_place(url: str) -> str:
    """Of KV events. Raises WorkerError."""
    found = _place(url)
    if found is None or int(found[1]) > 65_535:
        raise WorkerError(f"{url!r} is no place of KV events; write it as tcp://host:port")
    return url


def checked_ranks(ranks: int) -> int:
    """Raises WorkerError."""
    if not 1 <= ranks <= 1024:
        raise WorkerError("dp is its number of data-parallel ranks, 1 to 1024")
    return ranks


def checked_phase(phase: str) -> Phase:
    """Raises WorkerError."""
    for known in PHASES:
        if phase == known:
            return known
    raise WorkerError(f"{phase!r} is no phase of a turn; write prefill, decode or both")


def checked_handover(handover: str) -> Handover:
    """Raises WorkerError."""
    for known in HANDOVERS:
        if handover == known:
            return known
    raise WorkerError(f"{handover!r} is no hand-over between workers; write vllm or sglang")


def checked_port(port: int) -> int:
    """Of an SGLang's bootstrap server. Raises WorkerError."""
    if not 1 <= port <= 65_535:
        raise WorkerError("bootstrap-port is a port, 1 to 65535")
    return port


def worker_spec(text: str) -> WorkerSpec:
    """Of one `URL[,name=NAME][,dp=N][,phase=PHASE][,handover=ENGINE][,bootstrap-port=N]`. Raises WorkerError."""
    written, *options = text.split(",")
    url = normal_url(written)
    name, ranks, events, replay = worker_name(url), 0, "", ""
    phase: Phase = "both"
    handover, port = HANDOVERS[0], BOOTSTRAP_PORT
    for option in options:
        key, equals, value = (part.strip() for part in option.partition("="))
        if key == "name" and equals:
            name = checked_name(value)
        elif key == "dp" and equals:
            ranks = checked_ranks(_number(value))
        elif key == "kv-events" and equals:
            events = checked_place(value)
        elif key == "kv-replay" and equals:
            replay = checked_place(value)
        elif key == "phase" and equals:
            phase = checked_phase(value)
        elif key == "handover" and equals:
            handover = checked_handover(value)
        elif key == "bootstrap-port" and equals:
            port = checked_port(_number(value))
        else:
            known = (
                "write URL[,name=NAME][,dp=RANKS][,phase=PHASE][,handover=vllm|sglang][,bootstrap-port=PORT]"
                "[,kv-events=tcp://HOST:PORT][,kv-replay=tcp://HOST:PORT]"
            )
            raise WorkerError(f"worker {text!r} has the unknown option {option!r}; {known}")
    return WorkerSpec(
        name=name,
        url=url,
        ranks=ranks,
        phase=phase,
        handover=handover,
        bootstrap_port=port,
        kv_events=events,
        kv_replay=replay,
    )


def _number(text: str) -> int:
    """0 where it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def worker_specs(texts: Iterable[str]) -> list[WorkerSpec]:
    """Of a whole fleet. Raises WorkerError, also where two are the same or have one name."""
    specs: list[WorkerSpec] = []
    names: dict[str, str] = {}
    urls: dict[str, str] = {}
    for text in texts:
        spec = worker_spec(text)
        if spec.url in urls:
            raise WorkerError(f"{urls[spec.url]} and {text} are the same worker; remove one")
        if spec.name in names:
            raise WorkerError(
                f"two workers are called {spec.name!r}: {names[spec.name]} and {text}; "
                "remove one or give it another name (URL,name=NAME)"
            )
        names[spec.name] = urls[spec.url] = text
        specs.append(spec)
    return specs


def lacking_phase(specs: Iterable[WorkerSpec]) -> str:
    """What a whole fleet lacks for a turn to go through all of its phases, and the remedy; empty: nothing."""
    roles = {(spec.phase, spec.handover) for spec in specs}
    phases = {phase for phase, _ in roles}
    if phases and phases <= {"prefill"}:
        return "workers that prefill and none that decodes; name one with phase=decode, or without a phase"
    if "decode" in phases and "prefill" not in phases:
        return "workers that only decode and none that prefills; name one with phase=prefill, or leave phase=decode out"
    for handover in HANDOVERS:
        if ("decode", handover) in roles and ("prefill", handover) not in roles:
            return f"workers with phase=decode,handover={handover} and none with phase=prefill,handover={handover}"
    return ""
