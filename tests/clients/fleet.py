"""What the libraries talk to: real replicas, mock workers, and one worker for answers that a mock does not give."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.processes import Processes, Replica, Worker

CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"
PATHS = {CHAT: "/v1/chat/completions", RESPONSES: "/v1/responses", MESSAGES: "/v1/messages"}
MODEL = "mock-model"

REFUSAL = "The sampling parameters of this request are beyond what this worker offers."
TOOL, TOOL_ARGUMENTS, TOOL_ANSWER = "weather", {"city": "Oslo"}, "It rains in Oslo."


@dataclass(frozen=True)
class Fleet:
    workers: list[Worker]
    replicas: list[Replica]
    """Two, over `workers`."""
    odd: Replica
    """Before the worker that acts by the model's name: `tools`, `refuse`, `cut`."""
    lost: Replica
    """Before a worker that is gone."""


@contextlib.contextmanager
def standing_fleet(folder: Path) -> Iterator[Fleet]:
    """All of it, as long as the block runs."""
    with Processes(folder) as processes, odd_worker() as odd_url:
        workers = processes.workers(3, "--ttft-ms", "2", "--itl-ms", "2", "--tokens", "10000")
        [gone] = processes.workers(1, apart=True)
        [odd] = processes.replicas(1, [Worker("odd", odd_url, gone.process)], folder / "odd")
        [lost] = processes.replicas(1, [gone], folder / "lost")
        replicas = processes.replicas(2, workers, folder / "claims")
        gone.process.kill()
        yield Fleet(workers, replicas, odd, lost)


@contextlib.contextmanager
def odd_worker() -> Iterator[str]:
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _OddWorker) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _OddWorker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        models = [{"id": model, "object": "model", "created": 0, "owned_by": "odd"} for model in _ANSWERS]
        self._answer(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        family = next((family for family, path in PATHS.items() if path == self.path.partition("?")[0]), CHAT)
        _ANSWERS.get(request.get("model"), _OddWorker._refuse)(self, family, request)

    def _refuse(self, family: str, request: dict[str, Any]) -> None:
        error = {"message": REFUSAL, "type": "invalid_request_error"}
        if family == MESSAGES:
            self._answer(400, {"type": "error", "error": error, "request_id": "req_odd"})
        else:
            self._answer(400, {"error": error | {"param": None, "code": "bad_sampling"}})

    def _call_tool(self, family: str, request: dict[str, Any]) -> None:
        """The first tool's call, and after its result a sentence."""
        wanted = TOOL_ANSWER if "21 degrees" in json.dumps(request) else None
        self._answer(200, _TOOL_ANSWERS[family](wanted))

    def _cut(self, family: str, request: dict[str, Any]) -> None:
        """A stream that breaks between two events."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in _CUT_EVENTS[family]:
            name = "" if family == CHAT else f"event: {event['type']}\n"
            data = f"{name}data: {json.dumps(event)}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.close_connection = True

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


_ANSWERS = {"refuse": _OddWorker._refuse, "tools": _OddWorker._call_tool, "cut": _OddWorker._cut}


# --- what it says ----------------------------------------------------------------------------------------------------


def _chat_tool(text: str | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if text is None:
        function = {"name": TOOL, "arguments": json.dumps(TOOL_ARGUMENTS)}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "tools",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop" if text else "tool_calls"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10},
    }


def _responses_tool(text: str | None) -> dict[str, Any]:
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": TOOL,
        "arguments": json.dumps(TOOL_ARGUMENTS),
        "status": "completed",
    }
    message = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }
    return _response("completed", [message if text else call])


def _response(status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": status,
        "model": "tools",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 5,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 10,
        },
    }


def _messages_tool(text: str | None) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "toolu_1", "name": TOOL, "input": TOOL_ARGUMENTS}
    return _message([{"type": "text", "text": text} if text else call], "end_turn" if text else "tool_use")


def _message(content: list[dict[str, Any]], stop: str | None) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tools",
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 5},
    }


def _chat_chunk(text: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "cut",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}],
    }


_TOOL_ANSWERS = {CHAT: _chat_tool, RESPONSES: _responses_tool, MESSAGES: _messages_tool}

_OUTPUT_TEXT = {"type": "output_text", "text": "", "annotations": []}
_CUT_EVENTS: dict[str, list[dict[str, Any]]] = {
    CHAT: [_chat_chunk(word) for word in ("One", " two", " three")],
    RESPONSES: [
        {"type": "response.created", "sequence_number": 0, "response": _response("in_progress", [])},
        {
            "type": "response.output_item.added",
            "sequence_number": 1,
            "output_index": 0,
            "item": {"type": "message", "id": "msg_1", "role": "assistant", "status": "in_progress", "content": []},
        },
        {
            "type": "response.content_part.added",
            "sequence_number": 2,
            "item_id": "msg_1",
            "output_index": 0,
            "content_index": 0,
            "part": _OUTPUT_TEXT,
        },
        *(
            {
                "type": "response.output_text.delta",
                "sequence_number": 3 + place,
                "item_id": "msg_1",
                "output_index": 0,
                "content_index": 0,
                "delta": word,
                "logprobs": [],
            }
            for place, word in enumerate(("One", " two", " three"))
        ),
    ],
    MESSAGES: [
        {"type": "message_start", "message": _message([], None)},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
            for word in ("One", " two", " three")
        ),
    ],
}
