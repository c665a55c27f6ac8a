"""The simulated KV cache: what each session has already had computed on this worker.

Prompts and completions are bytes (see `wire.render_chat`); a token is four of them, counted from the start, so a common
prefix in bytes is a common prefix in tokens. The block size is one token, as in SGLang's radix cache. As in a real
engine, at least the last token of a prompt is computed anew, since its logits are needed.

The cache is kept per session, model and rank. That is stricter than real engines, which share prefixes between
sessions: here a cached token always means that *this session* was on *this worker and rank* before.
"""

from __future__ import annotations

from collections import OrderedDict

TOKEN_BYTES = 4
"""About what English text has per token."""

BRANCHES = 4
"""Sequences kept per session, model and rank: parallel turns and edited conversations fork."""


def count_tokens(text: bytes) -> int:
    """How many tokens `text` has; the last one may be short."""
    return -(-len(text) // TOKEN_BYTES)


class PrefixCache:
    """The last sequences of each session, least recently used sessions dropped first."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, dict[tuple[str, int | None], list[bytes]]] = OrderedDict()

    def __len__(self) -> int:
        """How many sessions it knows."""
        return len(self._sessions)

    def clear(self) -> None:
        """Forget all."""
        self._sessions.clear()

    def cached_tokens(self, session: str, model: str, rank: int | None, prompt: bytes) -> int:
        """How many of the prompt's tokens need no prefill: the longest prefix that it shares with what is held."""
        held = self._sessions.get(session, {}).get((model, rank), ())
        shared = max((common_prefix(sequence, prompt) for sequence in held), default=0)
        return max(0, min(shared // TOKEN_BYTES, count_tokens(prompt) - 1))

    def remember(self, session: str, model: str, rank: int | None, sequence: bytes) -> None:
        """Hold `sequence`. What it extends is replaced by it; beyond `BRANCHES` the oldest goes."""
        held = self._sessions.setdefault(session, {}).setdefault((model, rank), [])
        held[:] = [other for other in held if not sequence.startswith(other)]
        held.append(sequence)
        if len(held) > BRANCHES:
            del held[0]
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)


def common_prefix(one: bytes, other: bytes) -> int:
    """Length of the longest common prefix, by halving: byte loops in Python are too slow for long prompts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
