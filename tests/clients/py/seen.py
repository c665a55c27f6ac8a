"""What every library's script does: the same cases, told to the tests as JSON.

A script gives `main` a maker for each API that its library speaks. A maker makes a client of one place (address, model,
headers), with three abilities: `plain`, `streamed` and `tools`.

The argument is JSON: `sessions` (an id for each API and case), `urls` (two replicas), `odd`, `lost` and `model`. What
is printed is JSON: for each API and case what came of it, or `{"error": {"type", "message", "status"}}`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

CASE_SECONDS = 60
QUESTION = "Say something."
TOOL_QUESTION = "What is the weather in Oslo?"
TOKENS = 20
"""OpenAI's responses have 16 at least, to which LiteLLM rounds up."""
ENDLESS = 10_000
"""Tokens of an answer that nobody waits for."""


@dataclass(frozen=True)
class Place:
    url: str
    """Without `/v1`."""
    model: str
    headers: dict[str, str] = field(default_factory=dict)


class Client(Protocol):
    def plain(self, question: str, tokens: int) -> str:
        """The whole answer."""

    def streamed(self, question: str, tokens: int, most: int | None) -> list[str]:
        """The pieces of the answer as they came; after `most` of them the stream is left as users leave it."""

    def tools(self, question: str) -> dict[str, Any]:
        """Asked with a tool `weather(city)` that says "21 degrees": its `name`, its `arguments`, then the `text`."""


Maker = Callable[[Place], Client]


def main(makers: dict[str, Maker]) -> None:
    """Run all cases of all APIs that are asked for."""
    orders = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    signal.signal(signal.SIGALRM, _too_long)
    seen: dict[str, dict[str, Any]] = {}
    for family, sessions in orders["sessions"].items():
        seen[family] = {}
        for case, session in sessions.items():
            signal.alarm(CASE_SECONDS)
            begun = time.monotonic()
            try:
                result = _CASES[case](makers[family], orders, session)
            except BaseException as error:  # the tests are told
                result = {"error": _told(error)}
            finally:
                signal.alarm(0)
            seen[family][case] = result | {"seconds": round(time.monotonic() - begun, 2)}
    json.dump(seen, out)
    out.flush()
    os._exit(0)  # no thread of a library may keep it


def _abort(maker: Maker, orders: dict[str, Any], session: str) -> dict[str, Any]:
    client = maker(_place(orders, session))
    return {"pieces": len(client.streamed(QUESTION, ENDLESS, 3))}


def _plain(maker: Maker, orders: dict[str, Any], session: str) -> dict[str, Any]:
    return {"text": maker(_place(orders, session)).plain(QUESTION, TOKENS)}


def _streamed(maker: Maker, orders: dict[str, Any], session: str) -> dict[str, Any]:
    return {"pieces": maker(_place(orders, session)).streamed(QUESTION, TOKENS, None)}


def _session(maker: Maker, orders: dict[str, Any], session: str) -> dict[str, Any]:
    """Two clients, one at each replica; four turns in turn."""
    clients = [maker(_place(orders, session, replica)) for replica in (0, 1)]
    for client in clients:
        client.plain(QUESTION, TOKENS)
    for client in clients:
        client.streamed(QUESTION, TOKENS, None)
    return {}


def _final(maker: Maker, orders: dict[str, Any], session: str) -> dict[str, Any]:
    maker(_place(orders, session)).plain(QUESTION, TOKENS)
    return {"text": maker(_place(orders, session, 1, final=True)).plain(QUESTION, TOKENS)}


def _final_streamed(maker: Maker, orders: dict[str, Any], session: str) -> dict[str, Any]:
    maker(_place(orders, session)).plain(QUESTION, TOKENS)
    return {"pieces": maker(_place(orders, session, 1, final=True)).streamed(QUESTION, TOKENS, None)}


def _tools(maker: Maker, orders: dict[str, Any], session: str) -> dict[str, Any]:
    return maker(Place(orders["odd"], "tools", _headers(session))).tools(TOOL_QUESTION)


def _refused(maker: Maker, orders: dict[str, Any], session: str) -> dict[str, Any]:
    return {"text": maker(Place(orders["odd"], "refuse", _headers(session))).plain(QUESTION, TOKENS)}


def _refused_streamed(maker: Maker, orders: dict[str, Any], session: str) -> dict[str, Any]:
    return {"pieces": maker(Place(orders["odd"], "refuse", _headers(session))).streamed(QUESTION, TOKENS, None)}


def _lost(maker: Maker, orders: dict[str, Any], session: str) -> dict[str, Any]:
    return {"text": maker(Place(orders["lost"], orders["model"], _headers(session))).plain(QUESTION, TOKENS)}


def _cut(maker: Maker, orders: dict[str, Any], session: str) -> dict[str, Any]:
    return {"pieces": maker(Place(orders["odd"], "cut", _headers(session))).streamed(QUESTION, TOKENS, None)}


_CASES = {
    "abort": _abort,
    "plain": _plain,
    "streamed": _streamed,
    "session": _session,
    "final": _final,
    "final_streamed": _final_streamed,
    "tools": _tools,
    "refused": _refused,
    "refused_streamed": _refused_streamed,
    "lost": _lost,
    "cut": _cut,
}


def _place(orders: dict[str, Any], session: str, replica: int = 0, *, final: bool = False) -> Place:
    headers = _headers(session) | ({"X-Dynamo-Session-Final": "true"} if final else {})
    return Place(orders["urls"][replica], orders["model"], headers)


def _headers(session: str) -> dict[str, str]:
    return {"X-Dynamo-Session-ID": session}


def _told(error: BaseException) -> dict[str, Any]:
    status = getattr(error, "status_code", None)
    return {"type": f"{type(error).__module__}.{type(error).__qualname__}", "message": str(error), "status": status}


def _too_long(*_: object) -> None:
    raise TimeoutError(f"not done after {CASE_SECONDS} s")
