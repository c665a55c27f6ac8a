"""One mock worker as an ASGI app: `create_mock` is the only wiring.

FastAPI has the control plane: `/v1/models`, `/health`, `/mock/...`. Turns go to `turns.TurnService` before Starlette
sees them.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from mocker import turns, wire
from mocker.faults import Fault
from mocker.settings import MockSettings
from mocker.wire import RequestError


def create_mock(settings: MockSettings) -> MockWorker:
    """One mock worker. Several fit in one process: nothing is shared between them."""
    return MockWorker(settings)


class MockWorker(FastAPI):
    """The app of one mock worker."""

    def __init__(self, settings: MockSettings) -> None:
        super().__init__(title=settings.name, openapi_url=None)
        self.settings = settings
        self._turns = turns.TurnService(settings)
        self._name_header = (turns.NAME_HEADER.encode(), settings.name.encode())
        self._serve_api()
        self._serve_mock_api()
        self._shape_errors()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in turns.PARSERS:
            await self._turns(scope, receive, send)
        else:
            await super().__call__(scope, receive, self._naming(send))

    def reset_running_turns(self) -> None:
        """Reset the connections of all running turns, which are recorded as aborted. For a quick stop."""
        self._turns.reset_running()

    def _naming(self, send: Send) -> Send:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._name_header]}
            await send(message)

        return named

    def _serve_api(self) -> None:
        created = int(time.time())
        models = {
            model: {"id": model, "object": "model", "created": created, "owned_by": "mocker"}
            for model in self.settings.models
        }

        @self.get("/v1/models")
        async def list_models(request: Request) -> Response:
            self._turns.authorise(request.headers.get("authorization"))
            return _json({"object": "list", "data": list(models.values())})

        @self.get("/v1/models/{model:path}")
        async def retrieve_model(request: Request, model: str) -> Response:
            self._turns.authorise(request.headers.get("authorization"))
            self._turns.check_model(model)
            return _json(models[model])

        @self.get("/health")
        async def health() -> Response:
            return _json({"status": "ok"})

    def _serve_mock_api(self) -> None:
        log, cache, faults = self._turns.log, self._turns.cache, self._turns.faults

        @self.get("/mock/state")
        async def state() -> Response:
            return _json(
                {"name": self.settings.name, "active": log.active, "sessions": len(cache), "served": log.served}
            )

        @self.get("/mock/turns")
        async def list_turns(session: str | None = None) -> Response:
            return _json({"turns": log.turns(session)})

        @self.delete("/mock/turns")
        async def clear_turns() -> Response:
            return _json({"cleared": log.clear()})

        @self.get("/mock/faults")
        async def list_faults() -> Response:
            return _json({"faults": faults.pending()})

        @self.post("/mock/faults")
        async def order_fault(request: Request) -> Response:
            try:
                faults.order(msgspec.json.decode(await request.body(), type=Fault))
            except msgspec.DecodeError as error:
                raise RequestError(400, str(error)) from error
            return _json({"faults": faults.pending()})

        @self.delete("/mock/faults")
        async def clear_faults() -> Response:
            faults.clear()
            return _json({"faults": []})

    def _shape_errors(self) -> None:
        @self.exception_handler(RequestError)
        async def on_request_error(_: Request, error: RequestError) -> Response:
            return Response(error.body, error.status, headers=error.headers, media_type="application/json")

        @self.exception_handler(RequestValidationError)
        async def on_validation_error(_: Request, error: RequestValidationError) -> Response:
            body = wire.error_body(str(error), kind="invalid_request_error")
            return Response(body, 400, media_type="application/json")

        @self.exception_handler(HTTPException)
        async def on_http_exception(request: Request, error: HTTPException) -> Response:
            body = wire.error_body(f"{error.detail}: {request.method} {request.url.path}", kind="invalid_request_error")
            return Response(body, error.status_code, headers=error.headers, media_type="application/json")


def _json(value: Any) -> Response:
    return Response(wire.encode(value), media_type="application/json")
