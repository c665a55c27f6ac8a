"""The control plane: health, readiness, metrics, the merged model list; OpenAI-shaped errors for all other paths."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httpx
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from app.errors import TurnError, documented, error_response
from app.fleet.workers import Fleet, Worker
from app.http.headers import Noted
from app.metrics import Metrics
from app.sessions.tenants import Tenants

_PROBED = ("/", "/healthz", "/livez", "/ping")
"""What load balancers and orchestrators ask for when nobody has told them: as /health."""
_MODELS_TIMEOUT = 5.0
"""Seconds that a worker has to list its models; slower ones are left out of that answer."""
_FORWARDED = ("authorization", "x-api-key", "openai-organization", "openai-project")


def add_control_plane(
    app: FastAPI,
    *,
    fleet: Fleet,
    metrics: Metrics,
    draining: Callable[[], bool],
    tls: ssl.SSLContext,
    tenants: Tenants,
    worker_key: str = "",
) -> None:
    """Register the routes on `app`. `tls` is for https workers; `worker_key` is sent them in place of the client's."""

    async def merged(request: Request) -> list[dict[str, Any]]:
        noted: Noted = {}
        for name, value in request.headers.raw:
            noted.setdefault(name.lower(), []).append(value)
        tenants.authenticate(noted)
        if worker_key:
            headers = {"authorization": f"Bearer {worker_key}"}
        else:
            headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        return await _merged_models(fleet, headers, tls)

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

    @app.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def render_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", summary="The models of all workers", responses=documented(*_MODEL_ERRORS))
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await merged(request)})

    @app.get("/v1/models/{name:path}", summary="One model", responses=documented("model_not_found", *_MODEL_ERRORS))
    async def model(name: str, request: Request) -> Response:
        for entry in await merged(request):
            if entry["id"] == unquote(name):
                return JSONResponse(entry)
        raise TurnError("model_not_found", f"no worker has the model {name!r}", param="model")

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
            TurnError("not_found", f"there is nothing at {request.method} {request.url.path}; the API is below /v1/"),
        )

    @app.exception_handler(Exception)  # the framework logs it with its traceback
    async def on_fault(request: Request, error: Exception) -> Response:
        return _answer(request, TurnError("internal_error", "the router failed to answer; its log has the reason"))


_MODEL_ERRORS = ("invalid_api_key", "no_worker", "worker_unreachable")
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"description": "No traffic, please", "content": {"application/json": {"schema": {"type": "object"}}}}
}


def _answer(request: Request, error: TurnError) -> Response:
    status, headers, body = error_response(error, request.scope["raw_path"])
    response = Response(body, status)
    response.raw_headers = headers
    return response


async def _merged_models(fleet: Fleet, headers: dict[str, str], tls: ssl.SSLContext) -> list[dict[str, Any]]:
    """The workers' models, each id once, in the workers' order. Raises TurnError when no worker answered."""
    workers = list(fleet)
    if not workers:
        raise TurnError("no_worker", "no worker is configured; start the router with --worker URL")
    # The environment's proxies are for the internet; workers are reached directly, as turns are.
    async with httpx.AsyncClient(trust_env=False, verify=tls, timeout=_MODELS_TIMEOUT) as client:
        lists = await asyncio.gather(*(_models_of(client, worker, headers) for worker in workers))
    answered = [entries for entries in lists if isinstance(entries, list)]
    if not answered:
        refused = next((error for error in lists if isinstance(error, TurnError)), None)
        raise refused or TurnError("worker_unreachable", "no worker answered with its models")
    merged: dict[str, dict[str, Any]] = {}
    for entry in (entry for entries in answered for entry in entries):
        merged.setdefault(entry["id"], entry)
    return list(merged.values())


async def _models_of(
    client: httpx.AsyncClient, worker: Worker, headers: dict[str, str]
) -> list[dict[str, Any]] | TurnError | None:
    try:
        response = await client.get(f"{worker.url}/v1/models", headers=headers)
        if response.status_code == 401:
            return TurnError("invalid_api_key", "the workers refuse this API key")
        response.raise_for_status()
        data = response.json()["data"]
        return [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
