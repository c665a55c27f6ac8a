"""What a source of workers is called: `file:///path.toml`, `dns://name:port`, `dns+srv://name`, or a claims URL, whose
registry is meant."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from app.fleet.discovery.dns import DnsSource
from app.fleet.discovery.file import FileSource
from app.fleet.discovery.source import Source

_REMEDY = "write file:///path.toml, dns://name:port, dns+srv://name, or a claims URL (file:///dir, etcd://...)"


def open_source(url: str) -> Source | None:
    """The source that a URL names; None: the registry at that claims URL. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme in ("dns", "dns+srv"):
        return DnsSource(url, parts)
    if parts.scheme == "file" and parts.path.endswith(".toml"):
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise ValueError(f"{url} names no absolute path; write three slashes: file:///etc/coatcheck/workers.toml")
        return FileSource(Path(unquote(parts.path)))
    if parts.scheme in ("file", "etcd"):
        return None
    why = "nobody else can write into this process's memory" if parts.scheme == "memory" else "it is of no known kind"
    raise ValueError(f"{url}: {why}; {_REMEDY}")


def check_sources(urls: Iterable[str]) -> None:
    """Raises ValueError."""
    seen: set[str] = set()
    for url in urls:
        open_source(url)
        if url in seen:
            raise ValueError(f"{url} is given twice; remove one")
        seen.add(url)
