"""The page's files, and its one stream of events.

The files say nothing of the router, so whoever may look gets them without a proof: a browser can send none when it
opens a page. Every URL in them is relative, because a proxy may have put a prefix before it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.routing import BaseRoute
from starlette.types import Message, Receive, Scope, Send

from app.errors import TurnError, documented
from app.overview import Look, Order, Overview
from app.sessions.tenants import Admins

_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Of each of them. Nothing runs but the file of scripts, nothing is loaded from elsewhere, and no page may frame it."""
MOST_LOOKING = 50
"""At once; each costs a snapshot every two seconds."""
_PROVEN = 10
"""Of these seats only for who has proven to be an admin: strangers cannot keep them out."""
_STALLED = 30.0
"""Seconds that somebody who looks may take nothing; then the stream is cut."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Page:
    admins: Admins
    overview: Overview

    def whole(self, request: Request) -> bool:
        """Whether to show all of it. Raises TurnError where there is nothing to be shown at all."""
        host = request.client.host if request.client is not None else None
        refusal = self.admins.refusal_to_look(host, request.headers.raw)
        if refusal is not None:
            raise TurnError("forbidden", refusal)
        return self.admins.allows(host, request.headers.raw)


def add_page(app: FastAPI, page: Page) -> None:
    """Register `/admin/`, what it loads, and `/admin/stream`."""
    app.state.page = page
    app.routes.extend(_routes())  # `include_router` makes them once more, in the loop


def _page(request: Request) -> Page:
    """Of the app that was asked."""
    page: Page = request.app.state.page
    return page


@functools.cache
def _routes() -> list[BaseRoute]:
    """Of every app in this process, as the admin API's."""
    routes = APIRouter(prefix="/admin", responses=documented("forbidden"))

    for path, (file, kind) in _FILES.items():
        routes.add_api_route(f"/{path}", _file(file, kind), include_in_schema=False)

    @routes.get("", include_in_schema=False)
    async def without_slash(request: Request) -> Response:
        _page(request).whole(request)
        return Response(status_code=307, headers={"location": "admin/", **HEADERS})

    @routes.get(
        "/stream",
        summary="The fleet as it is, and what changes, as an event stream",
        response_class=EventSourceResponse,
        responses=documented("overloaded"),
    )
    async def stream(
        request: Request,
        order: Annotated[Order, Query(description="By what workers are sorted.")] = "state",
        page: Annotated[int, Query(ge=0, le=1000, description="Of the workers, which page.")] = 0,
        find: Annotated[str, Query(max_length=100, description="Only workers like that.")] = "",
    ) -> Response:
        """`snapshot`, then every two seconds `change`, to be merged into it as RFC 7396 says. Without the admin token,
        where there is one, no address, reason, model, tenant, session or event is in it."""
        shown = _page(request)
        overview, look = shown.overview, Look(shown.whole(request), order, page, find.strip())
        if overview.looking >= MOST_LOOKING - (0 if look.whole else _PROVEN):
            raise TurnError("overloaded", f"{overview.looking} look at this replica already")
        told = _told(overview, look, head=bool(request.scope.get("coatcheck.head")))
        return _Events(told, headers=HEADERS, sep="\n", send_timeout=_STALLED)

    return routes.routes


class _Events(EventSourceResponse):
    """One that ends as HTTP wants it also where the router stops: its maker cuts it there, which uvicorn takes for a
    fault of the application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        said: list[Message] = []

        async def sent(message: Message) -> None:
            said[:] = [message]
            await send(message)

        await super().__call__(scope, receive, sent)
        if said and (said[0]["type"] == "http.response.start" or said[0].get("more_body", False)):
            await send({"type": "http.response.body", "body": b""})


async def _told(overview: Overview, look: Look, *, head: bool) -> AsyncIterator[ServerSentEvent]:
    if head:
        return  # of what never ends only the head can be waited for
    async for name, said in overview.follow(look):
        yield ServerSentEvent(_encode(said).decode(), event=name, sep="\n")


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    """What answers one of the files to whoever may look."""
    body = importlib.resources.files(__package__).joinpath(name).read_bytes()
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {**HEADERS, "cache-control": "no-cache", "etag": tag}

    async def answer(request: Request) -> Response:
        _page(request).whole(request)
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    return answer
