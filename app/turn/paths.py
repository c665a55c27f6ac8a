"""Which path goes where. What a worker could take for a path that changes it is found out however it is spelled."""

from __future__ import annotations

import enum
import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable
from urllib.parse import unquote

ENGINE_PATHS = (
    "/tokenize",
    "/detokenize",
    "/rerank",
    "/v2/rerank",
    "/score",
    "/pooling",
    "/classify",
    "/generate",
    "/invocations",
    "/completion",
    "/infill",
)
"""What vLLM, SGLang and llama.cpp answer outside /v1 and what changes nothing in them."""

NO_ENGINE_PATHS = "none"

_ADMIN = "/admin"
_OWN = ("/health", "/ready", "/metrics", "/openapi.json", _ADMIN)

_MANAGES = frozenset(
    {
        *("sleep", "is_sleeping", "wake", "wake_up", "wakeup", "pause", "is_paused", "resume", "slow_down"),
        *("terminate", "shutdown", "restart", "is_scaling_elastic_ep", "server_info", "internal", "engine"),
        *("distserve", "hicache", "slots", "props", "model", "soft_prompt", "template", "sampling", "download"),
    }
)
"""First segments, behind /v1 or not, of paths that change a worker, or say what is inside it."""
_manages = re.compile(
    # What vLLM, SGLang, LMDeploy, TensorRT-LLM, llama.cpp and TabbyAPI have is spelled VERB_OBJECT ...
    r"(?:load|unload|reload|update|init|destroy|reset|flush|clear|start|stop|begin|finish|set|send|receive|release"
    r"|resume|pause|continue|configure|freeze|dump|abort|scale|add|remove|register|unregister|attach|detach|enable"
    r"|disable|evict|open|close|switch|get_(?:internal|server|weights?|world))_"
    # ... or has one of these words in it.
    r"|(?:.*_)?(?:loras?|adapters?|weights?|profile|profiler|rpc|sleep|sleeping|hicache)(?:_|$)"
).match
_OF_MODELS = frozenset({"load", "unload", "reload", "apply", "delete", "pull", "import", "download"})
"""Second segments behind /models that change what a worker serves: llama.cpp, LocalAI."""
_PLAIN = re.compile(r"(?:/[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)+").fullmatch
_parameters = re.compile(r"[;?#]")
_ending = re.compile(r"[.:,]")
_no_letter = re.compile(r"[^a-z0-9_]")
_DECODINGS = 8
_CACHED_LENGTH = 256
_USUAL = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/tokenize"}
)
_read_alike = re.compile(r"/v1/([a-z]+)(?:/[A-Za-z0-9_-]+)*", re.ASCII).fullmatch
"""A path that has one reading, with its first word: most of those with an id in them, which are all new."""


class Kind(enum.Enum):
    TURN = enum.auto()
    """A worker answers."""
    MODEL = enum.auto()
    """Below /v1/models: the router, if it is the id of a model, else a worker."""
    MANAGEMENT = enum.auto()
    """It changes workers: an admin's only."""
    OURS = enum.auto()
    """The control plane answers."""


class Paths:
    """The paths of one router."""

    def __init__(self, engine_paths: Iterable[str] = ENGINE_PATHS) -> None:
        """`engine_paths`: outside /v1, to be answered by workers; `none`: no path. Raises ValueError."""
        self._engine = frozenset(engine_paths) - {NO_ENGINE_PATHS}
        for path in self._engine:
            if not _PLAIN(path):
                raise ValueError(f"{path!r} is no plain path; write one like /tokenize, without an end of its own")
            if path.startswith("/v1/") or path == "/v1":
                raise ValueError(f"{path} is below /v1, where workers answer without this setting")
            if f"{path}/".startswith(tuple(f"{own}/" for own in _OWN)):
                raise ValueError(f"{path} is answered by the router itself")
            if is_management(path):
                raise ValueError(f"{path} changes workers; an admin may send it without this setting, others never")
        self.usual = _USUAL | self._engine
        """Turns, without a look at anything else."""
        self._of_short = functools.lru_cache(maxsize=1024)(self._kind)

    def kind(self, path: str) -> Kind:
        """`path` without its percent-encoding."""
        return self._of_short(path) if len(path) <= _CACHED_LENGTH else self._kind(path)

    def is_admins(self, path: str) -> bool:
        """Whether only admins get an answer."""
        return path == _ADMIN or path.startswith(f"{_ADMIN}/") or self.kind(path) is Kind.MANAGEMENT

    def _kind(self, path: str) -> Kind:
        if is_management(path):
            return Kind.MANAGEMENT
        if path.startswith("/v1/models/"):
            return Kind.MODEL
        if path in self._engine or (path.startswith("/v1/") and path != "/v1/models"):
            return Kind.TURN
        return Kind.OURS


def is_plain(path: str) -> bool:
    """Whether all readers understand a path alike."""
    return _PLAIN(path) is not None


def is_management(path: str) -> bool:
    """Whether any reader could take `path` for one that changes a worker: fronts of workers decode once more, merge
    slashes, resolve dots, cut parameters off, and some know no case."""
    alike = _read_alike(path)
    if alike is not None and alike[1] != "models":
        return alike[1] in _MANAGES or _manages(alike[1]) is not None
    for _ in range(_DECODINGS):
        decoded = unquote(path)
        if decoded == path:
            break
        path = decoded
    else:
        return True  # nobody who means well encodes that often
    as_said: list[str] = []
    resolved: list[str] = []
    for segment in unicodedata.normalize("NFKC", path).casefold().replace("\\", "/").split("/"):
        bare = _parameters.split("".join(segment.split()), maxsplit=1)[0]
        if bare == "..":
            del resolved[-1:]
        elif word := _no_letter.sub("", _ending.split(bare, maxsplit=1)[0].replace("-", "_")):
            as_said.append(word)
            resolved.append(word)
    return _manages_by(as_said) or _manages_by(resolved)


def _manages_by(words: list[str]) -> bool:
    behind = list(itertools.dropwhile("v1".__eq__, words))
    if not behind:
        return False
    if behind[0] == "models":
        return len(behind) > 1 and behind[1] in _OF_MODELS
    return behind[0] in _MANAGES or _manages(behind[0]) is not None
