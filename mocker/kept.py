"""What only its maker knows, over HTTP: stored responses, conversations, files and batches.

All of it is in memory and for good, until it is deleted or the worker ends. Another worker answers 404, which is how a
misrouted request shows. The shapes follow OpenAI's API reference (https://platform.openai.com/docs/api-reference).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from mocker import wire
from mocker.paths import Paths
from mocker.responses import Responses
from mocker.wire import RequestError

AnswerNow = Callable[[str, bytes], tuple[int, bytes]]
"""Status and body for a path and the body of a request to it."""


class _Items(msgspec.Struct):
    items: list[dict[str, Any]] | None = None
    metadata: Any = None


class _BatchRequest(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Any = None


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw


_parse_items = wire.decoder(_Items)
_parse_batch = wire.decoder(_BatchRequest)
_parse_line = wire.decoder(_Line)


@dataclass(frozen=True, slots=True)
class _File:
    identity: str
    name: str
    purpose: str
    content: bytes
    created: int = field(default_factory=lambda: int(time.time()))

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.identity,
            "object": "file",
            "bytes": len(self.content),
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class Files:
    """Those of one worker."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._all: dict[str, _File] = {}

    def add(self, name: str, purpose: str, content: bytes) -> _File:
        file = _File(f"file-{self._new_id()}", name, purpose, content)
        self._all[file.identity] = file
        return file

    def find(self, identity: str) -> _File:
        """Raises RequestError if this worker has none of that id."""
        file = self._all.get(identity)
        if file is None:
            raise RequestError(404, f"No such File object: {identity}", param="id")
        return file

    def delete(self, identity: str) -> None:
        """Raises RequestError as `find`."""
        self.find(identity)
        del self._all[identity]

    def all(self) -> list[_File]:
        return list(self._all.values())


class Batches:
    """Those of one worker. One is worked off `seconds` after it was made, when somebody looks."""

    def __init__(self, files: Files, new_id: Callable[[], str], answer: AnswerNow, seconds: float) -> None:
        self._files = files
        self._new_id = new_id
        self._answer = answer
        self._seconds = seconds
        self._all: dict[str, dict[str, Any]] = {}
        self._due: dict[str, float] = {}

    def create(self, request: _BatchRequest) -> dict[str, Any]:
        """Raises RequestError, also for the input file of another worker."""
        file = self._files.find(request.input_file_id)
        lines = [_parse_line(line) for line in file.content.splitlines() if line.strip()]
        own = f"batch_{self._new_id()}"
        now = int(time.time())
        self._due[own] = time.monotonic() + self._seconds
        self._all[own] = {
            "id": own,
            "object": "batch",
            "endpoint": request.endpoint,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window,
            "status": "in_progress",
            "created_at": now,
            "in_progress_at": now,
            "completed_at": None,
            "cancelled_at": None,
            "output_file_id": None,
            "error_file_id": None,
            "errors": None,
            "request_counts": {"total": len(lines), "completed": 0, "failed": 0},
            "metadata": request.metadata,
        }
        return self._all[own]

    def find(self, identity: str) -> dict[str, Any]:
        """Raises RequestError if this worker has none of that id."""
        batch = self._all.get(identity)
        if batch is None:
            raise RequestError(404, f"No batch found with id '{identity}'.", param="id")
        if batch["status"] == "in_progress" and time.monotonic() >= self._due[identity]:
            self._work_off(batch)
        return batch

    def cancel(self, identity: str) -> dict[str, Any]:
        """Raises RequestError as `find`, and if it has ended."""
        batch = self.find(identity)
        if batch["status"] != "in_progress":
            raise RequestError(409, f"The batch is {batch['status']}.")
        batch.update(status="cancelled", cancelled_at=int(time.time()))
        return batch

    def all(self) -> list[dict[str, Any]]:
        return [self.find(identity) for identity in self._all]

    def _work_off(self, batch: dict[str, Any]) -> None:
        output, failed, lines = b"", 0, self._files.find(batch["input_file_id"]).content.splitlines()
        for line in map(_parse_line, filter(bytes.strip, lines)):
            status, body = self._answer(line.url, bytes(line.body))
            failed += status != 200
            said = {"status_code": status, "request_id": f"req_{self._new_id()}", "body": msgspec.Raw(body)}
            own = f"batch_req_{self._new_id()}"
            output += wire.encode({"id": own, "custom_id": line.custom_id, "response": said, "error": None}) + b"\n"
        total = batch["request_counts"]["total"]
        batch.update(
            status="completed",
            completed_at=int(time.time()),
            output_file_id=self._files.add(f"{batch['id']}_output.jsonl", "batch_output", output).identity,
            request_counts={"total": total, "completed": total - failed, "failed": failed},
        )


def paths(responses: Responses, new_id: Callable[[], str], answer: AnswerNow, seconds: float) -> Paths:
    """Those below `/v1` of all of them. `seconds`: how long a batch takes."""
    paths = Paths("/v1")
    files = Files(new_id)
    _serve_responses(paths, responses)
    _serve_conversations(paths, responses)
    _serve_files(paths, files)
    _serve_batches(paths, Batches(files, new_id, answer, seconds))
    return paths


def _serve_responses(paths: Paths, responses: Responses) -> None:
    @paths.get("/responses/{identity}")
    async def retrieve(identity: str, request: Request) -> Response:
        kept = responses.find(identity)
        if request.query_params.get("stream", "false").lower() != "true":
            return _json(kept.said)
        if not kept.said["background"]:
            raise RequestError(400, "Only a response of the background can be streamed.", param="stream")
        after = request.query_params.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal():
            raise RequestError(400, "'starting_after' must be an integer.", param="starting_after")
        return EventSourceResponse(kept.follow(int(after) + 1), sep="\n", ping=0)

    @paths.delete("/responses/{identity}")
    async def delete(identity: str) -> Response:
        responses.delete(identity)
        return _json({"id": identity, "object": "response", "deleted": True})

    @paths.post("/responses/{identity}/cancel")
    async def cancel(identity: str) -> Response:
        kept = responses.find(identity)
        if not kept.said["background"]:
            raise RequestError(400, "Only a response of the background can be cancelled.")
        kept.cancel()
        return _json(kept.said)

    @paths.get("/responses/{identity}/input_items")
    async def input_items(identity: str) -> Response:
        return _list(responses.find(identity).items)


def _serve_conversations(paths: Paths, responses: Responses) -> None:
    conversations = responses.conversations

    @paths.post("/conversations")
    async def create(request: Request) -> Response:
        asked = _parse_items(await request.body() or b"{}")
        return _json(conversations.create(asked.items or [], asked.metadata or {}).as_json())

    @paths.get("/conversations/{identity}")
    async def retrieve(identity: str) -> Response:
        return _json(conversations.find(identity).as_json())

    @paths.post("/conversations/{identity}")
    async def update(identity: str, request: Request) -> Response:
        conversation = conversations.find(identity)
        conversation.metadata = _parse_items(await request.body()).metadata or {}
        return _json(conversation.as_json())

    @paths.delete("/conversations/{identity}")
    async def delete(identity: str) -> Response:
        conversations.delete(identity)
        return _json({"id": identity, "object": "conversation.deleted", "deleted": True})

    @paths.post("/conversations/{identity}/items")
    async def add(identity: str, request: Request) -> Response:
        conversations.find(identity)
        return _list(conversations.extend(identity, _parse_items(await request.body()).items or []))

    @paths.get("/conversations/{identity}/items")
    async def items(identity: str) -> Response:
        return _list(conversations.find(identity).items)

    @paths.get("/conversations/{identity}/items/{item}")
    async def retrieve_item(identity: str, item: str) -> Response:
        for each in conversations.find(identity).items:
            if each["id"] == item:
                return _json(each)
        raise RequestError(404, f"Item with id '{item}' not found.")

    @paths.delete("/conversations/{identity}/items/{item}")
    async def delete_item(identity: str, item: str) -> Response:
        conversation = conversations.find(identity)
        conversation.items = [each for each in conversation.items if each["id"] != item]
        return _json(conversation.as_json())


def _serve_files(paths: Paths, files: Files) -> None:
    @paths.post("/files")
    async def upload(request: Request) -> Response:
        parts = _multipart(request.headers.get("content-type", ""), await request.body())
        if "file" not in parts:
            raise RequestError(400, "'file' is a required property", param="file")
        name, content = parts["file"]
        _, purpose = parts.get("purpose", ("", b"user_data"))
        return _json(files.add(name, purpose.decode("utf-8", "replace"), content).as_json())

    @paths.get("/files")
    async def list_all() -> Response:
        return _list([file.as_json() for file in files.all()])

    @paths.get("/files/{identity}")
    async def retrieve(identity: str) -> Response:
        return _json(files.find(identity).as_json())

    @paths.delete("/files/{identity}")
    async def delete(identity: str) -> Response:
        files.delete(identity)
        return _json({"id": identity, "object": "file", "deleted": True})

    @paths.get("/files/{identity}/content")
    async def content(identity: str) -> Response:
        return Response(files.find(identity).content, media_type="application/octet-stream")


def _serve_batches(paths: Paths, batches: Batches) -> None:
    @paths.post("/batches")
    async def create(request: Request) -> Response:
        return _json(batches.create(_parse_batch(await request.body())))

    @paths.get("/batches")
    async def list_all() -> Response:
        return _list(batches.all())

    @paths.get("/batches/{identity}")
    async def retrieve(identity: str) -> Response:
        return _json(batches.find(identity))

    @paths.post("/batches/{identity}/cancel")
    async def cancel(identity: str) -> Response:
        return _json(batches.cancel(identity))


def _multipart(content_type: str, body: bytes) -> dict[str, tuple[str, bytes]]:
    """The parts of a form (RFC 7578) by their names: file name and content. Raises RequestError."""
    kind, options = _options(content_type)
    if kind != "multipart/form-data" or "boundary" not in options:
        raise RequestError(400, "The body must be multipart/form-data.")
    parts = {}
    for part in (b"\r\n" + body).split(b"\r\n--" + options["boundary"].encode())[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        for line in head.decode("utf-8", "replace").split("\r\n"):
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition":
                _, said = _options(value)
                parts[said.get("name", "")] = (said.get("filename", ""), content)
    return parts


def _options(value: str) -> tuple[str, dict[str, str]]:
    """A header's value and its parameters."""
    first, *rest = value.split(";")
    pairs = (each.partition("=") for each in rest)
    return first.strip().lower(), {name.strip().lower(): said.strip().strip('"') for name, _, said in pairs}


def _json(value: Any) -> Response:
    return Response(wire.encode(value), media_type="application/json")


def _list(items: list[dict[str, Any]]) -> Response:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return _json({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False})
