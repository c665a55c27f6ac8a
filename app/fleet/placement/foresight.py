"""What a router with a policy that places by what is cached has for each turn that is free to choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from app.fleet.candidates import Prompt
from app.fleet.placement.blocks import Piece
from app.fleet.workers import Target

PROMPTED = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/v1/responses"})
"""The paths whose requests have prompts that are cached."""
RENDERED = ("tools", "system", "instructions", "messages", "prompt", "input")
"""The fields of their bodies that a prompt is made of, in the order in which engines render them."""
SALT = "cache_salt"
"""The field by which a client keeps what is cached of its prompts apart from that of others'."""


class Foreseen(Prompt[Target], Protocol):
    """The prompt of one turn that is free to choose. Nothing is read of it until somebody asks."""

    @property
    def waits(self) -> bool:
        """It must be `read` before it is asked."""
        ...

    async def read(self) -> None:
        """Bounded in time; raises nothing."""
        ...

    def placed(self, target: Target) -> None:
        """The turn goes there."""
        ...

    def settle(self, target: Target, usage: tuple[int, int] | None) -> None:
        """The turn was served at the target, which has said how many tokens the prompt has, and how many of these it
        had in its cache; None: it has not said."""
        ...


class Foresight(Protocol):
    """Of one router."""

    def prompt(self, path: bytes, model: str, said: Mapping[str, Piece]) -> Foreseen | None:
        """Of a request for `path`; `said`: the fields of its body that tell of its prompt, in JSON. None: it has no
        prompt that could be cached."""
        ...
