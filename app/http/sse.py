"""What the router must know of a Server-Sent Events stream: its end marker, and how to say an error inside it."""

from __future__ import annotations

_MARK = b"data: [DONE]"
_BARE = b"data:[DONE]"  # the space after the colon is optional (WHATWG HTML 9.2.6)


class DoneDetector:
    """Tells when OpenAI's end marker has come by, wherever the stream was split. Clients stop reading there."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b"\n"

    def feed(self, data: bytes) -> bool:
        """True when the marker's last byte is in `data`."""
        window = self._tail + data
        self._tail = window[-len(_MARK) :]
        for mark in (_MARK, _BARE):
            at = window.find(mark)
            while at >= 0:
                if at > 0 and window[at - 1] in b"\r\n":
                    return True
                at = window.find(mark, at + 1)
        return False


def error_event(body: bytes, sent: bytes) -> bytes:
    """An error object as one event, after a stream whose last bytes were `sent` (empty: nothing was sent).

    An event that the failure cut through is ended first, so that ours is never glued to it. At a boundary nothing is
    put in between: a blank line after an `id:` line would be an empty event to openai-python.
    """
    event = b"data: " + body + b"\n\n"
    if not sent or sent.endswith((b"\n\n", b"\r\r", b"\r\n\r\n")):
        return event
    return (b"\n" if sent.endswith((b"\n", b"\r")) else b"\n\n") + event
