"""OpenAI's Responses API: `POST /v1/responses`, and the responses that are kept.

A stored response is known to this worker only, as everything that a worker keeps. One that is made in the background
goes on without its request, and its events can be followed and taken up again by their numbers. The shapes follow
OpenAI's API reference (https://platform.openai.com/docs/api-reference/responses, and …/responses-streaming).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from mocker import identity, wire
from mocker.cache import count_tokens
from mocker.conversations import Conversations
from mocker.wire import Ask, Finish, Message, RequestError, Usage

MAX_KEPT = 10_000
"""Responses that are kept; beyond it the oldest go."""

Item = dict[str, Any]


class _Request(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[Item] = ""
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    tools: list[Any] | None = None
    prompt_cache_key: Any = None
    metadata: Any = None


_parse_request = wire.decoder(_Request)


class KeptResponse:
    """A response that was stored, or is being made in the background."""

    def __init__(self, said: dict[str, Any], items: list[Item], context: list[Item], root: str) -> None:
        self.said = said
        """The response object, as it stands."""
        self.items = items
        """Its own input."""
        self.context = context
        """All that was said before its output, input of earlier responses too."""
        self.root = root
        """The first response of its chain."""
        self.work: asyncio.Task[None] | None = None
        """What makes it, in the background."""
        self._events: list[bytes] = []
        self._changed = asyncio.Event()

    @property
    def running(self) -> bool:
        return self.said["status"] in ("queued", "in_progress")

    def append(self, events: bytes) -> None:
        """More of what is said to those who follow it."""
        self._events += [each + b"\n\n" for each in events.split(b"\n\n")[:-1]]
        self._wake()

    def cancel(self) -> None:
        """End its making. Nothing if it has ended."""
        if self.running:
            self.said["status"] = "cancelled"
        if self.work is not None:
            self.work.cancel()
        self._wake()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """Its events from number `start` on, until it has ended."""
        while True:
            changed = self._changed
            for event in self._events[start:]:
                yield event
                start += 1
            if not self.running and start >= len(self._events):
                return
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Responses:
    """The responses that one worker keeps, and its conversations."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.conversations = Conversations(new_id)
        self._new_id = new_id
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()

    def find(self, identity: str) -> KeptResponse:
        """Raises RequestError if this worker has none of that id."""
        kept = self._kept.get(identity)
        if kept is None:
            raise RequestError(404, f"Response with id '{identity}' not found.")
        return kept

    def delete(self, identity: str) -> None:
        """Forget it, and end its making. Raises RequestError as `find`."""
        self.find(identity).cancel()
        del self._kept[identity]

    def parse(self, body: bytes) -> Ask:
        """`POST /v1/responses`. Raises RequestError, also for a previous response or a conversation of another
        worker."""
        request = _parse_request(body)
        store, background = request.store is not False, bool(request.background)
        if background and not store:
            raise RequestError(400, "background needs store to be true", param="background")
        own = f"resp_{self._new_id()}"
        context, root, named = self._before(request, own)
        items = _items(request.input)
        context = [*context, *items]
        head = [Message(role="system", content=request.instructions)] if request.instructions else []
        if request.tools:
            head.insert(0, Message(role="system", content=wire.json_text(request.tools)))
        prompt = wire.render_chat([*head, *map(_message, context)])
        if not context and not head:
            raise RequestError(400, "input must not be empty", param="input")

        def answer(_: str) -> ResponseAnswer:
            kept = KeptResponse(_response(own, request, store), items, context, root)
            if store:
                self._keep(own, kept)
            return ResponseAnswer(kept, self._said)

        return Ask(
            model=request.model,
            prompt=prompt,
            prompt_tokens=count_tokens(prompt),
            answer=answer,
            max_tokens=wire.checked_limit(request.max_output_tokens, "max_output_tokens"),
            stream=bool(request.stream),
            background=background,
            kept_as=root if store else None,
            named=identity.of_body(request.prompt_cache_key, request.metadata) or named,
        )

    def _before(self, request: _Request, own: str) -> tuple[list[Item], str, identity.Named | None]:
        """What was said before, the first response of the chain, and the session that they name."""
        if request.previous_response_id is not None:
            previous = self._kept.get(request.previous_response_id)
            if previous is None:
                message = f"Previous response with id '{request.previous_response_id}' not found."
                code = "previous_response_not_found"
                raise RequestError(404, message, param="previous_response_id", code=code)
            named = ("previous_response_id", previous.root)
            return [*previous.context, *previous.said["output"]], previous.root, named
        conversation = _conversation(request)
        if conversation is not None:
            return self.conversations.find(conversation).items, own, ("conversation", conversation)
        return [], own, None

    def _keep(self, own: str, kept: KeptResponse) -> None:
        self._kept[own] = kept
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)[1].cancel()

    def _said(self, kept: KeptResponse) -> None:
        """A response has ended well: its conversation, if it has one, goes on with it."""
        if kept.said["conversation"] is not None:
            self.conversations.extend(kept.said["conversation"]["id"], [*kept.items, *kept.said["output"]])


class ResponseAnswer:
    """One response with one message of text. Events are numbered from 0."""

    def __init__(self, kept: KeptResponse, ended: Callable[[KeptResponse], None]) -> None:
        """`ended` is told when it has ended well."""
        self.kept = kept
        self._ended = ended
        self._place = {"item_id": kept.said["id"].replace("resp_", "msg_"), "output_index": 0, "content_index": 0}
        self._number = 0
        delta = {**self._place, "delta": wire.SLOT, "logprobs": []}
        self._head, tail = wire.split_at_slot(self._event("response.output_text.delta", delta))
        self._tail, _, _ = tail.rpartition(b"0}")
        self._number = 0

    def queued(self) -> bytes:
        return wire.encode(self.kept.said)

    def whole(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        self._end(texts[0], finish, usage)
        return wire.encode(self.kept.said)

    def begin(self, usage: Usage) -> bytes:
        said = self.kept.said
        events = self._event("response.created", {"response": said})
        if said["background"]:
            events += self._event("response.queued", {"response": said})
        said["status"] = "in_progress"
        item = self._item(None, "in_progress")
        return (
            events
            + self._event("response.in_progress", {"response": said})
            + self._event("response.output_item.added", {"output_index": 0, "item": item})
            + self._event("response.content_part.added", {**self._place, "part": _part("")})
        )

    def token(self, pieces: Sequence[bytes]) -> bytes:
        number = self._number
        self._number += 1
        return b"%b%b%b%d}\n\n" % (self._head, pieces[0], self._tail, number)

    def end(self, texts: Sequence[str], finish: Finish, usage: Usage) -> bytes:
        (text,) = texts
        self._end(text, finish, usage)
        said = self.kept.said
        done = {**self._place, "text": text, "logprobs": []}
        return (
            self._event("response.output_text.done", done)
            + self._event("response.content_part.done", {**self._place, "part": _part(text)})
            + self._event("response.output_item.done", {"output_index": 0, "item": said["output"][0]})
            + self._event(f"response.{said['status']}", {"response": said})
        )

    def failed(self, error: RequestError) -> bytes:
        said = self.kept.said
        said.update(status="failed", error={"code": "server_error", "message": error.message})
        return self._event("response.failed", {"response": said})

    def left(self) -> None:
        if self.kept.running:
            self.kept.said["status"] = "cancelled"

    def _end(self, text: str, finish: Finish, usage: Usage) -> None:
        status = "completed" if finish == "stop" else "incomplete"
        self.kept.said.update(
            status=status,
            completed_at=int(time.time()) if finish == "stop" else None,
            incomplete_details=None if finish == "stop" else {"reason": "max_output_tokens"},
            output=[self._item(text, status)],
            usage={
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        )
        self._ended(self.kept)

    def _item(self, text: str | None, status: str) -> Item:
        content = [] if text is None else [_part(text)]
        item = self._place["item_id"]
        return {"id": item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        event = wire.event({"type": kind, **fields, "sequence_number": self._number}, name=kind)
        self._number += 1
        return event


def _response(own: str, request: _Request, store: bool) -> dict[str, Any]:
    background = bool(request.background)
    conversation = _conversation(request)
    return {
        "id": own,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if background else "in_progress",
        "background": background,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata if isinstance(request.metadata, dict) else {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation},
        "prompt_cache_key": request.prompt_cache_key,
        "store": store,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": request.tools or [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


def _conversation(request: _Request) -> str | None:
    said = request.conversation
    named = said.get("id") if isinstance(said, dict) else said
    return named if isinstance(named, str) else None


def _items(said: str | list[Item]) -> list[Item]:
    """The input as items with ids."""
    if isinstance(said, str):
        said = [{"role": "user", "content": [{"type": "input_text", "text": said}]}] if said else []
    return [{"type": "message", "id": f"msg_{index}", **item} for index, item in enumerate(said)]


def _message(item: Item) -> Message:
    """As the template sees it: what is no message goes in as its JSON."""
    role, content = item.get("role"), item.get("content")
    if isinstance(role, str) and (content is None or isinstance(content, str)):
        return Message(role=role, content=content)
    if isinstance(role, str) and isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return Message(role=role, content=content)
    return Message(role="tool", content=wire.json_text(item))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
