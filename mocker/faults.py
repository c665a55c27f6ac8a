"""Faults that tests and demonstrations order from a worker, for its next turns."""

from __future__ import annotations

from collections import deque
from typing import Annotated, Literal

import msgspec

Mode = Literal["status", "hang", "reset", "slow"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0)]


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One order, the JSON of `POST /mock/faults`.

    - `status`: answer at once with `status` and `headers` and an OpenAI-shaped error.
    - `hang`: never answer, not even a head; ends when the client leaves.
    - `reset`: reset the connection (TCP RST) in place of the token after `after_tokens` tokens (in place of the last
      token at the latest), or in place of the whole answer of a turn that does not stream. A stream's head is sent
      before.
    - `slow`: serve with `ttft_ms` and `itl_ms` instead of the worker's own, where given.
    """

    mode: Mode
    times: Annotated[int, msgspec.Meta(ge=1)] | None = 1
    """How many turns it hits; null: every turn until the faults are cleared."""
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 503
    headers: dict[str, str] = {}
    after_tokens: Count = 0
    ttft_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None


class Faults:
    """Orders, first come, first served: one turn takes at most one fault."""

    def __init__(self) -> None:
        self._orders: deque[Fault] = deque()

    def order(self, fault: Fault) -> None:
        self._orders.append(fault)

    def take(self) -> Fault | None:
        """The fault that the turn that begins now must suffer."""
        if not self._orders:
            return None
        fault = self._orders[0]
        if fault.times is not None:
            fault.times -= 1
            if not fault.times:
                self._orders.popleft()
        return fault

    def pending(self) -> list[Fault]:
        return list(self._orders)

    def clear(self) -> None:
        """Withdraw all orders. Turns that suffer one already go on suffering."""
        self._orders.clear()
