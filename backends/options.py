"""The options of a store's URL, and how the URL is shown to people: never with what may be secret."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl

from backends.base import StoreConfigurationError


def shown(url: str) -> str:
    """Without user, password and the values of options. Where a host may stand, all before the last @ is taken for a
    login: a password with a bare / or ? in it ends the host's part of a URL early."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, separator, rest = "", "", url
    if not rest.startswith("/"):
        rest = rest.rpartition("@")[2]
    return scheme + separator + rest.partition("?")[0].partition("#")[0]


def parse_options(url: str, query: str, known: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """`known`: each option's name and the values that it may have; none listed: any text but an empty one.

    Raises StoreConfigurationError, whose message says what to change."""
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            choice = f"known: {', '.join(known)}" if known else "it has none"
            raise StoreConfigurationError(f"{shown(url)!r} has no option {_told(name, query)}; {choice}")
        if name in options:
            raise StoreConfigurationError(f"{shown(url)!r}: option {name!r} is given twice; give it once")
        if known[name] and value not in known[name]:
            raise StoreConfigurationError(
                f"{shown(url)!r}: option {name!r} is {_told(value, query)}; it may be {' or '.join(known[name])}"
            )
        if not value:
            raise StoreConfigurationError(f"{shown(url)!r}: option {name!r} is empty; give it a value or leave it out")
        options[name] = value
    return options


def _told(text: str, query: str) -> str:
    """Before an @ it may be the rest of a password that was cut at its question mark."""
    return "'...' (write %3F for ? in a password)" if "@" in query else repr(text)
