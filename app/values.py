"""What a setting's value may be, checked when it is read, and how values are written and shown."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_settings import NoDecode

from app.http.headers import Forwarding
from app.listening import read_place
from app.sessions.tenants import read_secret


class Spoken(NamedTuple):
    """What help calls a setting's value, a default that is made at start, and what is wrong with any other text."""

    value: str = ""
    default: str = ""
    wrong: str = ""


def usable(read: Callable[[Any], object], remedy: str = "") -> AfterValidator:
    """`read` gets the value, and raises ValueError with what is wrong; `remedy`: for a file that cannot be read."""

    def check(value: Any) -> Any:
        plain = (value.get_secret_value() or None) if isinstance(value, SecretStr) else value
        try:
            if plain is not None:
                read(plain)
        except OSError as error:
            empty = isinstance(error, ssl.SSLError)
            wrong = "has no certificates in it" if empty else f"cannot be read ({error.strerror})"
            raise ValueError(f"the file {wrong}; {remedy}") from None
        return value

    return AfterValidator(check)


def split_by(separators: str) -> BeforeValidator:
    def split(value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
            return tuple(word for text in texts for word in re.split(separators, text) if word)
        return value

    return BeforeValidator(split)


def stripped(value: Any) -> Any:
    """What a shell, an editor or a secret store puts around a secret is not of it: replicas that were given it in
    different ways would disagree."""
    given = value.get_secret_value() if isinstance(value, SecretStr) else value
    if not isinstance(given, str) or not given:
        return value
    if not given.strip():
        raise ValueError("nothing but white space; give the secret, or leave the setting out")
    return given.strip()


Secret = Annotated[SecretStr, BeforeValidator(stripped)]

Texts = Annotated[tuple[str, ...], NoDecode, split_by(r"\s+")]


def check_proxies(texts: Iterable[str]) -> None:
    for text in texts:
        try:
            Forwarding((text,))
        except ValueError:
            raise ValueError(f"{text!r} is neither an address nor a network; write one like 10.0.0.0/8") from None


def check_secret(secret: str) -> None:
    if len(secret.encode()) > 64:
        raise ValueError("longer than 64 bytes; choose a shorter secret")


def check_secret_file(file: Path) -> None:
    check_secret(read_secret(file))


NO_PEERS = "off"


def check_peer_listen(text: str) -> None:
    if text != NO_PEERS and read_place(text).path is not None:
        raise ValueError("other machines cannot reach a unix socket; write HOST:PORT, [IPV6]:PORT or off")


def check_ca(file: Path) -> None:
    ssl.create_default_context(cafile=file)


def check_pem(file: Path) -> None:
    if "-----BEGIN " not in file.read_text(encoding="latin-1"):
        raise ValueError("the file is not PEM; name one that begins with -----BEGIN")


def spoken(value: Any) -> str:
    """A value as it is written in a file or a variable."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return " ".join(map(spoken, value)) or "(none)"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "(none)" if value is None else str(value)


def shown_value(value: Any) -> str:
    """A value for people, without what is secret in it."""
    if isinstance(value, SecretStr):
        return "********" if value.get_secret_value() else "(none)"
    return mask(spoken(value))


def mask(text: str) -> str:
    """`text` without the users and passwords of the URLs in it."""
    return re.sub(r"(?<=://)\S*@", "********@", text)
