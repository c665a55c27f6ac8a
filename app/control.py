"""The control plane: health, readiness, metrics, the merged model list; OpenAI-shaped errors for all other paths."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from app.errors import TurnError, documented, error_response
from app.exposition import OPEN_METRICS, PROMETHEUS, Scrape, wants_open_metrics
from app.fleet.workers import Fleet
from app.http.headers import Header
from app.management import Management
from app.turn.models import Models
from app.turn.paths import is_management

_PROBED = ("/", "/healthz", "/livez", "/ping")
"""What load balancers and orchestrators ask for when nobody has told them: as /health."""
T = TypeVar("T")


def add_control_plane(
    app: FastAPI,
    *,
    fleet: Fleet,
    scrape: Scrape,
    draining: Callable[[], bool],
    models: Models,
    management: Management,
    changed: Callable[[], None],
) -> None:
    """Register the routes on `app`. `changed` is called when an admin has had something done to workers."""

    @app.get("/health", summary="The process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    for path in _PROBED:
        app.add_api_route(path, health, include_in_schema=False)

    @app.get("/ready", summary="This replica may be sent traffic", responses=_NOT_READY)
    async def ready() -> Response:
        """Not tied to the claim store: replicas go on without it, and one hiccup must not take all of them out."""
        available = sum(worker.available for worker in fleet)
        status = "draining" if draining() else "ready" if available else "no worker available"
        return JSONResponse(
            {"status": status, "workers": len(fleet), "available": available},
            status_code=200 if status == "ready" else 503,
        )

    @app.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse, responses=_NOT_GATHERED)
    async def render_metrics(request: Request) -> Response:
        """As OpenMetrics where that is asked for. Of several processes the figures are one answer."""
        open_metrics = wants_open_metrics(request.headers.get("accept", ""))
        text = await scrape(open_metrics)
        return Response(text, media_type=OPEN_METRICS if open_metrics else PROMETHEUS)

    @app.get("/v1/models", summary="The models of all workers", responses=documented(*_MODEL_ERRORS))
    async def list_models(request: Request) -> Response:
        answer = await _unless_left(request, models.all(request.headers.raw))
        return Response(status_code=499) if answer is None else _whole(*answer)

    @app.exception_handler(TurnError)
    async def on_turn_error(request: Request, error: TurnError) -> Response:
        return _answer(request, error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return _answer(request, TurnError("invalid_request", f"{name}: {first['msg']}", param=name))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if is_management(request.scope["path"]):
            try:
                answer = await management.answer(request)
            except TurnError as refusal:
                return _answer(request, refusal)
            changed()
            return _whole(*answer)
        if error.status_code == 405:
            allow = (error.headers or {}).get("Allow", "").replace("GET", "GET, HEAD")
            return _answer(
                request,
                TurnError(
                    "method_not_allowed",
                    f"{request.method} is not allowed at {request.url.path}; allowed: {allow}",
                    headers=((b"allow", allow.encode()),),
                ),
            )
        return _answer(
            request,
            TurnError(
                "not_found",
                f"there is nothing at {request.method} {request.url.path}; the API is below /v1/, and engines' own "
                "paths outside it are those that the setting engine-paths names",
            ),
        )

    @app.exception_handler(Exception)  # the framework logs it with its traceback
    async def on_fault(request: Request, error: Exception) -> Response:
        return _answer(request, TurnError("internal_error", "the router failed to answer; its log has the reason"))


_MODEL_ERRORS = (
    "invalid_api_key",
    "no_worker",
    "worker_unreachable",
    "worker_reset",
    "worker_bad_response",
    "worker_timeout",
)
_NOT_GATHERED: dict[int | str, dict[str, Any]] = {
    503: {"description": "The other processes of this router cannot be asked", "content": {"text/plain": {}}}
}
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"description": "No traffic, please", "content": {"application/json": {"schema": {"type": "object"}}}}
}


def _answer(request: Request, error: TurnError) -> Response:
    return _whole(*error_response(error, request.scope["raw_path"]))


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None: the client has left, and so has `work`."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        task.cancel()  # nothing when it is done
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    return None


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _whole(status: int, headers: list[Header], body: bytes) -> Response:
    response = Response(body, status)
    response.raw_headers = headers
    return response
