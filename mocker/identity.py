"""Which session a request says that it belongs to, in whichever way a client says it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

Named = tuple[str, str]
"""What said it (a header, or a field of the body), and the session's id."""

SESSION_HEADERS = (
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "thread_id",
    "session-id",
    "session_id",
    "conversation-id",
    "conversation_id",
    "x-session-id",
    "x-session-affinity",
)
"""The first that says something counts: Dynamo's, Claude Code's, Codex's in all spellings, OpenCode's, and those of
load generators."""

AGENT_HEADER = "x-claude-code-agent-id"
"""Names a child agent of Claude Code, whose conversation is one of its own: SESSION/AGENT."""

_session_of_user = re.compile(r"user_.*_session_(.+)", re.DOTALL).fullmatch


def of_headers(headers: Mapping[str, str]) -> Named | None:
    """Names are lower-case."""
    for name in SESSION_HEADERS:
        session = headers.get(name, "").strip()
        if session:
            agent = headers.get(AGENT_HEADER) if name == "x-claude-code-session-id" else None
            return name, f"{session}/{agent}" if agent else session
    return None


def of_body(prompt_cache_key: Any, metadata: Any) -> Named | None:
    """Of the fields that name one. Clients fill them with whatever they like, so what is no text names none."""
    if isinstance(prompt_cache_key, str) and prompt_cache_key:
        return "prompt_cache_key", prompt_cache_key
    if isinstance(metadata, dict):
        session, user = metadata.get("session_id"), metadata.get("user_id")
        if isinstance(session, str) and session:
            return "metadata.session_id", session
        if isinstance(user, str) and user:
            return "metadata.user_id", _of_user(user)
    return None


def _of_user(user: str) -> str:
    """Claude Code says its session in there: `user_…_session_ID`, or JSON with `session_id`. Others: all of it."""
    if found := _session_of_user(user):
        return found[1]
    with contextlib.suppress(msgspec.DecodeError):
        said = msgspec.json.decode(user)
        if isinstance(said, dict) and isinstance(said.get("session_id"), str):
            return str(said["session_id"])
    return user
