"""Workers from names: `dns://name:port`, where each address is a worker; `dns+srv://name`, where each record is one.

Options in the URL: `scheme=https` (its certificate is the name's), `dp=RANKS`, `family=4|6|any` (without it the IPv6
addresses count only where there are no IPv4 ones: a machine usually has both, and is one worker), and
`nameserver=HOST[:PORT]`, asked in place of the system's, such as Consul's.

A worker of `dns://` is its address. One of `dns+srv://` keeps its name when its address changes (a pod of a StatefulSet
that was made anew), unless that name has several addresses: then each is a worker. Whatever is no answer (no such name,
no record, SERVFAIL, silence) is a trouble, and moves nobody.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl

from app.fleet.discovery.source import Aside, Pace, Said, Trouble, View, asked_again
from app.fleet.specs import (
    BOOTSTRAP_PORT,
    HANDOVERS,
    Phase,
    WorkerSpec,
    checked_handover,
    checked_phase,
    checked_port,
    checked_ranks,
    normal_url,
    worker_name,
)

_EVERY = 5.0
"""Seconds."""
_ANSWER_WITHIN = 3.0
"""Seconds that a name server has for one question."""
_MOST = 4096
"""Workers of one name."""

_Lookup = Callable[[str], list[str]]
"""The addresses of a name. Raises OSError, or what dnspython raises."""


class _Server(NamedTuple):
    address: str
    port: int


class DnsSource:
    """See the module's docstring."""

    def __init__(self, url: str, parts: SplitResult, *, every: float = _EVERY) -> None:
        """Raises ValueError."""
        self.label = url
        self._records = parts.scheme == "dns+srv"
        try:
            name, port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"{url}: {error}") from None
        if not name or parts.username is not None or parts.path.strip("/") or parts.fragment:
            raise ValueError(f"{url} is no name; write dns://name:port or dns+srv://name")
        if self._records == (port is not None):
            says = "its records say the ports" if self._records else "which port?"
            raise ValueError(f"{url}: {says}; write dns://name:port or dns+srv://name")
        self._name, self._port = name, port or 0
        self._scheme, self._ranks, self._family = "http", 0, ""
        self._phase: Phase = "both"
        self._handover, self._bootstrap_port = HANDOVERS[0], BOOTSTRAP_PORT
        self._server: _Server | None = None
        self._read_options(url, parts.query)
        self._pace = Pace(every)
        self._aside = Aside("workers-dns")

    def _read_options(self, url: str, query: str) -> None:
        for key, value in parse_qsl(query, keep_blank_values=True):
            match key, value:
                case "scheme", "http" | "https":
                    self._scheme = value
                case "family", "4" | "6" | "any":
                    self._family = value
                case "dp", _ if value.isascii() and value.isdigit():
                    self._ranks = checked_ranks(int(value))
                case "phase", _:
                    self._phase = checked_phase(value)
                case "handover", _:
                    self._handover = checked_handover(value)
                case "bootstrap-port", _ if value.isascii() and value.isdigit():
                    self._bootstrap_port = checked_port(int(value))
                case "nameserver", _:
                    self._server = _server(url, value)
                case _:
                    known = (
                        "scheme=http|https, family=4|6|any, dp=RANKS, phase=PHASE, handover=vllm|sglang, "
                        "bootstrap-port=PORT, nameserver=ADDRESS[:PORT]"
                    )
                    raise ValueError(f"{url}: {key}={value} is no option; there are {known}")

    def says(self) -> AsyncIterator[Said]:
        return asked_again(self._pace, self._look)

    def look(self) -> None:
        self._pace.hurry()

    async def aclose(self) -> None:
        pass

    async def _look(self) -> Said:
        from dns.exception import DNSException  # costs a tenth of a second, which only those pay who use it

        try:
            workers = await self._aside.run(self._workers_of_records if self._records else self._workers_of_addresses)
        except TimeoutError:
            return Trouble(f"{self._name} is not answered")
        except OSError as error:  # socket.gaierror too
            return Trouble(f"{self._name} is not answered ({error.strerror or error})")
        except DNSException as error:
            return Trouble(f"{self._name} is not answered ({' '.join(str(error).split()) or type(error).__name__})")
        except ValueError as error:
            return Trouble(f"the answer for {self._name} cannot be used: {error}")
        return View(tuple(sorted({each.name: each for each in workers[:_MOST]}.values(), key=lambda each: each.name)))

    # -- in the thread

    def _workers_of_addresses(self) -> list[WorkerSpec]:
        return [self._worker(address, self._port) for address in self._addresses(self._name)]

    def _workers_of_records(self) -> list[WorkerSpec]:
        found: list[WorkerSpec] = []
        for record in self._ask(self._name, "SRV"):
            host, port = record.target.to_text(omit_final_dot=True), int(record.port)
            if host == ".":
                continue  # RFC 2782: decidedly not available here
            addresses = self._addresses(host)
            named = worker_name(f"{self._scheme}://{host}:{port}") if len(addresses) == 1 else ""
            found += [self._worker(address, port, host, named) for address in addresses]
        return found

    def _worker(self, address: str, port: int, host: str = "", name: str = "") -> WorkerSpec:
        url = normal_url(f"{self._scheme}://{f'[{address}]' if ':' in address else address}:{port}")
        tls_name = (host or self._name) if self._scheme == "https" else ""
        return WorkerSpec(
            name=name or worker_name(url),
            url=url,
            ranks=self._ranks,
            phase=self._phase,
            handover=self._handover,
            bootstrap_port=self._bootstrap_port,
            tls_name=tls_name,
        )

    def _addresses(self, name: str) -> list[str]:
        """Each once, of the families that count."""
        find: _Lookup = self._system_addresses if self._server is None else self._asked_addresses
        found = [ipaddress.ip_address(address.partition("%")[0]) for address in dict.fromkeys(find(name))]
        of_4 = [str(each) for each in found if each.version == 4]
        of_6 = [str(each) for each in found if each.version == 6]
        return {"4": of_4, "6": of_6, "any": of_4 + of_6}.get(self._family, of_4 or of_6)

    def _system_addresses(self, name: str) -> list[str]:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]

    def _asked_addresses(self, name: str) -> list[str]:
        from dns.resolver import NoAnswer

        found: list[str] = []
        kinds = {"4": ("A",), "6": ("AAAA",)}.get(self._family, ("A", "AAAA"))
        for kind in kinds:
            if found and not self._family:
                break
            try:
                found += [str(record.address) for record in self._ask(name, kind)]
            except NoAnswer:
                if kind == kinds[-1] and not found:
                    raise
        return found

    def _ask(self, name: str, kind: str) -> Any:
        """The records; which fields they have depends on the kind."""
        from dns.resolver import Resolver

        resolver = Resolver(configure=self._server is None)
        if self._server is not None:
            resolver.nameservers, resolver.port = [self._server.address], self._server.port
        return resolver.resolve(name, kind, lifetime=_ANSWER_WITHIN, search=self._server is None)


def _server(url: str, text: str) -> _Server:
    """Raises ValueError."""
    host, port = text, "53"
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    try:
        return _Server(str(ipaddress.ip_address(host)), int(port))
    except ValueError:
        raise ValueError(f"{url}: nameserver={text} is no address; write one like 10.0.0.2 or 10.0.0.2:8600") from None
