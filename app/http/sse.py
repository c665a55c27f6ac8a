"""What the router must know of a Server-Sent Events stream: where it stands, and its API's last event.

Clients stop at that event, not at the end of the body: `[DONE]` (OpenAI's chat and completions), `message_stop`
(Anthropic's Messages), `response.completed`, `response.incomplete` or `response.failed` (OpenAI's Responses).
"""

from __future__ import annotations

import re
from collections import deque

import msgspec

_LAST = rb"(?:message_stop|response\.(?:completed|incomplete|failed))"
# The space after a colon is optional (WHATWG HTML 9.2.6). In a text that JSON carries, each quote has a backslash.
_COMING = re.compile(rb'[\r\n]data: ?\[DONE\]|[\r\n]event: ?%b|"type"[ ]{0,2}:[ ]{0,2}"%b"' % (_LAST, _LAST))
_LONGEST = 48
"""Bytes; more than any that `_COMING` finds."""
_GONE_BY = re.compile(
    rb'[\r\n]data: ?\[DONE\][\r\n]|[\r\n](?:event: ?%b[\r\n]|data: ?\{[ ]*"type"[ ]*:[ ]*"%b").*?(?:\n\n|\r\r|\n\r\n)'
    % (_LAST, _LAST),
    re.DOTALL,
)
_TYPED = re.compile(rb'[\r\n]data: ?(\{[^\r\n]*"type"[ ]*:[ ]*"%b"[^\r\n]*\})(?:\n\n|\r\r|\r\n\r\n)' % _LAST)
_LAST_TYPES = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
_BLANK_LINE = (b"\n\n", b"\r\r", b"\n\r\n")
_FRAMES = 8
LONG = 1024
_OPENING = 512


class EndDetector:
    """Tells when a stream's last event begins to come by, wherever the stream was split. It may be taken in by an
    object of that type inside of another event; who must be exact asks a `Trail`."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b"\n"

    def feed(self, data: bytes) -> bool:
        """True when what tells it from others ends in `data`: clients know nothing of it before."""
        window = self._tail + data
        self._tail = window[-_LONGEST:]
        return _COMING.search(window) is not None


class _Typed(msgspec.Struct):
    type: str = ""


_type_of = msgspec.json.Decoder(_Typed).decode


class Trail(deque[bytes | tuple[bytes]]):
    """What went by last of a stream. It is looked at only when something has gone wrong, and so costs a stream next to
    nothing: chunks that are not `LONG` are appended as they came, framing and all, all else is told to `note`.

    Of a long event that comes in many pieces its opening is kept apart."""

    __slots__ = ("_opening",)

    def __init__(self) -> None:
        super().__init__(maxlen=_FRAMES)
        self._opening = b""

    def note(self, data: bytes) -> None:
        if len(data) <= LONG:
            self.append((data,))
            return
        fresh = not self or _data(self[-1]).endswith(_BLANK_LINE)
        before_its_end = len(data) - 4
        at = max(data.rfind(blank, 0, before_its_end) for blank in _BLANK_LINE)
        if at >= 0 or fresh:
            self._opening = data[at : at + _OPENING] if at >= 0 else b"\n" + data[:_OPENING]
            self.clear()  # so that all that is kept comes behind it
        # The mark stands for what is left out, and begins no line.
        self.append((b"\0" + data[max(at + 2, len(data) - LONG) :],))

    @property
    def text(self) -> bytes:
        """As much of it as is kept."""
        start = b"\n" if len(self) < _FRAMES and not self._opening else b""
        return b"".join([self._opening, start, *map(_data, self)])

    @property
    def between_events(self) -> bool:
        """Whether the stream stands where an event of ours would be one of its own."""
        return not self or self.text.endswith(_BLANK_LINE)

    @property
    def over(self) -> bool:
        """Whether the last event has gone by, all of it."""
        text = self.text
        if _GONE_BY.search(text):
            return True
        for found in _TYPED.finditer(text):
            try:
                if _type_of(found[1]).type in _LAST_TYPES:
                    return True
            except msgspec.DecodeError:
                pass
        return False


def _data(kept: bytes | tuple[bytes]) -> bytes:
    """Of a chunk, or of another piece."""
    return kept[0] if isinstance(kept, tuple) else kept[kept.find(b"\r\n") + 2 : -2]
