"""OpenAI's conversations: lists of items, known to the worker that made them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mocker.wire import RequestError


@dataclass(slots=True)
class Conversation:
    identity: str
    metadata: Any
    items: list[dict[str, Any]]
    created: int = field(default_factory=lambda: int(time.time()))

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.identity,
            "object": "conversation",
            "created_at": self.created,
            "metadata": self.metadata,
        }


class Conversations:
    """Those of one worker."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._all: dict[str, Conversation] = {}

    def create(self, items: list[dict[str, Any]], metadata: Any) -> Conversation:
        conversation = Conversation(f"conv_{self._new_id()}", metadata, [])
        self._all[conversation.identity] = conversation
        self.extend(conversation.identity, items)
        return conversation

    def find(self, identity: str) -> Conversation:
        """Raises RequestError if this worker has none of that id."""
        conversation = self._all.get(identity)
        if conversation is None:
            raise RequestError(404, f"Conversation with id '{identity}' not found.")
        return conversation

    def delete(self, identity: str) -> None:
        """Raises RequestError as `find`."""
        self.find(identity)
        del self._all[identity]

    def extend(self, identity: str, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the items as they were added, with ids. Nothing is added to one that has been deleted."""
        added = [_item(item, f"msg_{self._new_id()}") for item in items]
        if identity in self._all:
            # A new list: a response that is being made goes on with what it has read.
            self._all[identity].items = [*self._all[identity].items, *added]
        return added


def _item(item: dict[str, Any], own: str) -> dict[str, Any]:
    content = item.get("content")
    if isinstance(content, str):
        item = {**item, "content": [{"type": "input_text", "text": content}]}
    return {"type": "message", "status": "completed", **item, "id": own}
