"""The paths of a mock worker, as functions: `Paths` makes Starlette's routes of them.

FastAPI would do so too. But it looks into each function for a schema that nobody asks for, which takes longer than all
the rest of a worker's start, and a fleet may be hundreds of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Answer = Callable[..., Awaitable[Response]]
"""Takes by their names what the path has in braces, and the request where it has a parameter of that name."""


class Paths:
    """`@paths.get("/files/{identity}")` and so on, all below `prefix`; `routes` are theirs, in that order."""

    def __init__(self, prefix: str = "") -> None:
        self.routes: list[Route] = []
        self._prefix = prefix

    def get(self, path: str) -> Callable[[Answer], Answer]:
        return self.of(path, "GET")

    def post(self, path: str) -> Callable[[Answer], Answer]:
        return self.of(path, "POST")

    def delete(self, path: str) -> Callable[[Answer], Answer]:
        return self.of(path, "DELETE")

    def of(self, path: str, *methods: str) -> Callable[[Answer], Answer]:
        def note(answer: Answer) -> Answer:
            code = answer.__code__
            route = Route(self._prefix + path, _taking(answer, code.co_varnames[: code.co_argcount]))
            route.methods = set(methods)  # and no HEAD, which engines do not answer
            self.routes.append(route)
            return answer

        return note


def _taking(answer: Answer, names: Sequence[str]) -> Callable[[Request], Awaitable[Response]]:
    async def called(request: Request) -> Response:
        known: dict[str, Any] = {"request": request, **request.path_params}
        return await answer(**{name: known[name] for name in names})

    return called
