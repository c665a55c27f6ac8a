"""One mock worker as an ASGI app: `create_mock` is the only wiring.

Turns go to `running.serve` before Starlette sees them, which has the rest. What clients and operators call there
is a call: it is recorded and takes faults, as turns do. Probes (`/health`, `/v1/models`) are not recorded, and suffer
the faults that say so; `/mock/...` is neither.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mocker import identity, kept, messages, metrics, running, turns, wire
from mocker.faults import Fault, FaultySend, reset_connection
from mocker.paths import Paths
from mocker.records import Call
from mocker.settings import MockSettings
from mocker.waiting import left_within
from mocker.wire import RequestError

_PROBED = ("/health", "/v1/models", "/metrics")


def create_mock(settings: MockSettings) -> MockWorker:
    """One mock worker. Several fit in one process: nothing is shared between them."""
    return MockWorker(settings)


class MockWorker(Starlette):
    """The app of one mock worker. Long because each of its paths is a method."""

    def __init__(self, settings: MockSettings) -> None:
        super().__init__()
        self.settings = settings
        self.turns = turns.TurnService(settings)
        self._name_header = (turns.NAME_HEADER.encode(), settings.name.encode())
        self._asleep = False
        self._refuse: Callable[[float], None] = lambda seconds: None
        self._calls: deque[Call] = deque(maxlen=settings.history)
        service = self.turns
        paths = Paths()
        self._serve_api(paths)
        self._serve_management(paths)
        self._serve_mock_api(paths)
        own = kept.paths(service.responses, service.new_id, service.answer_now, service.pace.ttft)
        self.routes.extend([*paths.routes, *own.routes])
        self._shape_errors()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if self.turns.metronome.held and not path.startswith("/mock/"):
            await self.turns.metronome.until(0)
        if scope["type"] == "http" and path in self.turns.apis:
            await running.serve(self.turns, scope, receive, send)
        elif scope["type"] == "http" and not self.turns.loaded and not path.startswith("/mock/"):
            await self._suffer(Fault(mode="load"), scope, receive, send, self._naming(send))
        elif scope["type"] == "http" and path in _PROBED and (fault := self.turns.faults.of_probes()) is not None:
            await self._suffer(fault, scope, receive, send, self._naming(send))
        elif scope["type"] != "http" or path in _PROBED or path.startswith("/mock/"):
            await super().__call__(scope, receive, self._naming(send))
        else:
            await self._call(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Record it, and let it suffer the fault that is ordered."""
        headers = turns.read_headers(scope)
        named_by, session = identity.of_headers(headers) or (None, None)
        fault = self.turns.faults.take()
        call = Call(
            start=time.time(),
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"].decode("latin-1"),
            session=session,
            named_by=named_by,
            authorization=headers.get("authorization"),
            api_key=headers.get("x-api-key"),
            request_id=headers.get(turns.REQUEST_ID_HEADER),
            fault=None if fault is None else fault.mode,
        )
        self._calls.append(call)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
            await answer(message)

        answer = send if fault is None else FaultySend(send, fault)
        named = self._naming(noting)
        try:
            self.turns.authorise(scope["path"], headers)
        except RequestError as error:
            await _shaped(scope["path"], error)(scope, receive, named)
        else:
            await self._suffer(fault, scope, receive, send, named)

    async def _suffer(self, fault: Fault | None, scope: Scope, receive: Receive, send: Send, named: Send) -> None:
        """Answer through `named`, as `fault` says. `send` is the connection's own."""
        try:
            match fault:
                case Fault(mode="status", status=status, headers=more):
                    raise running.ordered(status, more)
                case Fault(mode="fail"):
                    raise running.ordered(500)
                case Fault(mode="load"):
                    self.turns.check_loaded()
                case Fault(mode="crash", seconds=seconds):
                    self.turns.crash(seconds)
                    reset_connection(send)
                    await left_within(receive, None)
                    return
                case Fault(mode="hang"):
                    await left_within(receive, None)
                    return
                case Fault(mode="reset"):
                    reset_connection(send)
                    await left_within(receive, None)
                    return
                case Fault(mode="slow", ttft_ms=ttft_ms):
                    await asyncio.sleep((ttft_ms or 0) / 1000)
        except RequestError as error:
            await _shaped(scope["path"], error)(scope, receive, named)
        else:
            await super().__call__(scope, receive, named)

    @property
    def running_turns(self) -> int:
        return self.turns.log.active

    def reset_running_turns(self) -> None:
        """Reset the connections of all running turns, which are recorded as aborted. For a quick stop."""
        self.turns.reset_running()

    def order(self, fault: Fault) -> None:
        """For the requests to come; or, where it is the worker's own, from now on."""
        match fault:
            case Fault(mode="freeze", seconds=seconds):
                self.turns.metronome.hold(seconds)
            case Fault(mode="load", seconds=seconds):
                self.turns.load(seconds)
            case Fault(mode="refuse", seconds=seconds):
                self._refuse(seconds)
            case _:
                self.turns.faults.order(fault)

    def started(self, refuse: Callable[[float], None]) -> None:
        """It is being served from now on, in the running loop. `refuse` has new connections refused for so long."""
        self._refuse = refuse
        for publisher in self.turns.publishers:
            publisher.serve(asyncio.get_running_loop())
        if self.turns.between_workers is not None:
            self.turns.between_workers.serve(asyncio.get_running_loop())
        for fault in self.settings.faults:
            self.order(msgspec.structs.replace(fault))

    def close(self) -> None:
        """Its ports beside the one that it is served on are free again."""
        for publisher in self.turns.publishers:
            publisher.close()
        if self.turns.between_workers is not None:
            self.turns.between_workers.close()

    @property
    def bootstrap_port(self) -> int:
        """Where it is met by those that decode; 0: nowhere."""
        return 0 if self.turns.rooms is None else self.turns.rooms.port

    def _naming(self, send: Send) -> Send:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._name_header]}
            await send(message)

        return named

    def _serve_api(self, paths: Paths) -> None:
        created = int(time.time())
        adapters = self.turns.adapters

        def described(model: str) -> dict[str, Any]:
            return {"id": model, "object": "model", "created": created, "owned_by": "mocker"}

        @paths.get("/v1/models")
        async def list_models(request: Request) -> Response:
            self.turns.authorise(request.url.path, request.headers)
            return _json({"object": "list", "data": [described(each) for each in (*self.settings.models, *adapters)]})

        @paths.get("/v1/models/{model:path}/ready")
        async def ready(model: str) -> Response:
            return _json({"name": self.turns.check_model(model), "ready": True})

        @paths.get("/v1/models/{model:path}")
        async def retrieve_model(model: str) -> Response:
            return _json(described(self.turns.check_model(model)))

        @paths.get("/health")
        async def health() -> Response:
            return _json({"status": "ok"})

        @paths.get("/metrics")
        async def engine_metrics() -> Response:
            return Response(metrics.exposition(self.turns), media_type="text/plain; version=0.0.4")

    def _serve_management(self, paths: Paths) -> None:
        """Paths that change a worker. Adapters and sleep are remembered; the rest only leaves its record."""
        service = self.turns

        @paths.post("/v1/load_lora_adapter")
        async def load_adapter(request: Request) -> Response:
            name = _parse_adapter(await request.body()).lora_name
            if name in service.adapters:
                raise RequestError(400, f"The lora adapter '{name}' has already been loaded.")
            service.load_adapter(name)
            return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

        @paths.post("/v1/unload_lora_adapter")
        async def unload_adapter(request: Request) -> Response:
            name = _parse_adapter(await request.body()).lora_name
            if name not in service.adapters:
                raise RequestError(404, f"The lora adapter '{name}' cannot be found.")
            del service.adapters[name]
            return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")

        @paths.post("/sleep")
        async def sleep() -> Response:
            self._asleep = True
            return Response()

        @paths.post("/wake_up")
        async def wake_up() -> Response:
            self._asleep = False
            return Response()

        @paths.get("/is_sleeping")
        async def is_sleeping() -> Response:
            return _json({"is_sleeping": self._asleep})

        @paths.post("/reset_prefix_cache")
        async def reset_prefix_cache() -> Response:
            """As in vLLM it is 200 when nothing is done, since something runs."""
            for rank in service.ranks:
                rank.clear()
            return Response()

        @paths.post("/collective_rpc")
        async def collective_rpc() -> Response:
            return _json({"results": [None]})

        @paths.of("/v1/internal/{rest:path}", "GET", "POST", "PUT", "PATCH", "DELETE")
        async def internal(rest: str) -> Response:
            return _json({"status": "ok"})

    def _serve_mock_api(self, paths: Paths) -> None:
        log, cache, faults = self.turns.log, self.turns.cache, self.turns.faults

        @paths.get("/mock/state")
        async def state() -> Response:
            said = {"name": self.settings.name, "active": log.active, "sessions": len(cache), "served": log.served}
            handover = self.turns.between_workers
            if handover is not None:
                said |= {
                    "phase": self.settings.phase,
                    "staged": len(handover.staged),
                    "staged_blocks": handover.blocks,
                    "fetched": handover.fetched,
                    "expired": handover.expired,
                }
            return _json(said)

        @paths.get("/mock/engine")
        async def engine() -> Response:
            return _json({"ranks": metrics.state(self.turns)})

        @paths.get("/mock/turns")
        async def list_turns(request: Request) -> Response:
            return _json({"turns": log.turns(request.query_params.get("session"))})

        @paths.delete("/mock/turns")
        async def clear_turns() -> Response:
            return _json({"cleared": log.clear()})

        @paths.get("/mock/calls")
        async def list_calls(request: Request) -> Response:
            path = request.query_params.get("path")
            return _json({"calls": [call for call in self._calls if path in (None, call.path)]})

        @paths.delete("/mock/calls")
        async def clear_calls() -> Response:
            cleared = len(self._calls)
            self._calls.clear()
            return _json({"cleared": cleared})

        @paths.get("/mock/faults")
        async def list_faults() -> Response:
            return _json({"faults": faults.pending()})

        @paths.post("/mock/faults")
        async def order_fault(request: Request) -> Response:
            try:
                self.order(msgspec.json.decode(await request.body(), type=Fault))
            except msgspec.DecodeError as error:
                raise RequestError(400, str(error)) from error
            return _json({"faults": faults.pending()})

        @paths.delete("/mock/faults")
        async def clear_faults() -> Response:
            faults.clear()
            return _json({"faults": []})

    def _shape_errors(self) -> None:
        async def on_request_error(request: Request, error: Exception) -> Response:
            assert isinstance(error, RequestError)
            return _shaped(request.url.path, error)

        async def on_http_exception(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            message = f"{error.detail}: {request.method} {request.url.path}"
            return _shaped(request.url.path, RequestError(error.status_code, message, headers=error.headers))

        self.add_exception_handler(RequestError, on_request_error)
        self.add_exception_handler(HTTPException, on_http_exception)


class _Adapter(msgspec.Struct):
    lora_name: str


_parse_adapter = wire.decoder(_Adapter)


def _shaped(path: str, error: RequestError) -> Response:
    shape = messages.error_body if path.startswith("/v1/messages") else wire.error_body
    return Response(shape(error), error.status, headers=dict(error.headers), media_type="application/json")


def _json(value: Any) -> Response:
    return Response(wire.encode(value), media_type="application/json")
