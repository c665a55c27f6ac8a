"""Which path goes where."""

from __future__ import annotations

import time

import pytest

from app.turn.paths import ENGINE_PATHS, Kind, Paths
from tests.support.rows import rows

MANAGEMENT = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load_lora_adapter",
    "/v1/internal/model/load",
    "/v1/internal",
    "/v1/model/load",
    "/v1/lora/unload",
    "/v1/models/load",
    "/models/unload",
    "/models/delete/x",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/v1/sleep",
    "/collective_rpc",
    "/update_weights",
    "/update_weights_from_disk",
    "/init_weights_update_group",
    "/get_weights_by_name",
    "/v1/update_weights_from_something_new",
    "/start_profile",
    "/stop_profile",
    "/reset_prefix_cache",
    "/v1/reset_mm_cache",
    "/flush_cache",
    "/release_memory_occupation",
    "/pause_generation",
    "/abort_request",
    "/scale_elastic_ep",
    "/lora-adapters",
    "/slots/0",
    "/set_internal_state",
]
SPELLINGS = [
    "/v1//load_lora_adapter",
    "//v1/load_lora_adapter",
    "/V1/load_lora_adapter",
    "/v1/Load_LoRA_Adapter",
    "/v1/load-lora-adapter",
    "/v1/load%5Flora_adapter",
    "/v1%2Fload_lora_adapter",
    "/v1%252Fload_lora_adapter",
    "/v1%252Fsleep",
    "/v1/%2573leep",
    "//v1//sleep//",
    "/v1/Sleep",
    "/v1/%6coad_lora_adapter",
    "/v1/%256coad_lora_adapter",
    "/v1/load_lora_adapter/",
    "/v1/load_lora_adapter;x=1",
    "/v1/;x/load_lora_adapter",
    "/v1/load_lora_adapter?x",
    "/v1/load_lora_adapter%3Fx",
    "/v1/load_lora_adapter%00",
    "/v1/load_lora_adapter ",
    "/v1/ load_lora_adapter",
    "/v1/load_lora_adapter.json",
    "/v1\\load_lora_adapter",
    "/v1/./load_lora_adapter",
    "/v1/x/../load_lora_adapter",
    "/v1/x/%2e%2e/load_lora_adapter",
    "/v1/x/..;y/load_lora_adapter",
    "/v1/v1/load_lora_adapter",
    "/v1/../v1/load_lora_adapter",
    "/v1/\uff4c\uff4f\uff41\uff44_lora_adapter",
    "/v1/\u017fleep",
    "/v1/internal/../internal/x",
    "/v1/internal/x/../../chat/completions",
    "/v1/" + "%25" * 3000 + "6coad_lora_adapter",
]
TURNS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses/resp_1/cancel",
    "/v1/messages/count_tokens",
    "/v1/files/file-1/content",
    "/v1/files/sleep/content",
    "/v1/audio/speech",
    "/v1/images/edits",
    "/v1/fine_tuning/jobs/ft/pause",
    "/v1/engines/m/completions",
    "/v1/conversations/update_weights/items",
    "/v1/loader",
    "/v1/tokenize",
    "/v1/rerank",
    "/v1/x",
    "/v1/",
    *ENGINE_PATHS,
]
OURS = ["/", "/v1", "/v1/models", "/health", "/ready", "/metrics", "/openapi.json", "/admin/sessions", "/nowhere"]
OURS += ["/tokenize/", "/TOKENIZE", "/v2/score", "/V1/chat/completions"]


@rows("path", MANAGEMENT + SPELLINGS)
def test_what_changes_workers_is_known_however_it_is_spelled(path: str) -> None:
    assert Paths().kind(path) is Kind.MANAGEMENT


@rows("path", TURNS)
def test_what_workers_answer(path: str) -> None:
    assert Paths().kind(path) is Kind.TURN


@rows("path", OURS)
def test_what_the_router_answers(path: str) -> None:
    assert Paths().kind(path) is Kind.OURS


def test_below_the_models() -> None:
    assert Paths().kind("/v1/models/org/name") is Kind.MODEL
    assert Paths().kind("/v1/models/m/ready") is Kind.MODEL


def test_engine_paths_are_those_of_the_setting() -> None:
    paths = Paths(["/mine", "/a/b.c"])
    assert [paths.kind(path) for path in ("/mine", "/a/b.c", "/tokenize")] == [Kind.TURN, Kind.TURN, Kind.OURS]
    assert Paths(["none"]).kind("/tokenize") is Kind.OURS


@rows(
    ("path", "why"),
    [
        ("tokenize", "no plain path"),
        ("/tokenize/", "no plain path"),
        ("/a//b", "no plain path"),
        ("/a%2Fb", "no plain path"),
        ("/v1/x", "below /v1"),
        ("/health", "the router itself"),
        ("/admin/x", "the router itself"),
        ("/sleep", "changes workers"),
    ],
)
def test_what_engine_paths_cannot_be(path: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Paths([path])


def test_no_path_takes_long_to_be_judged() -> None:
    began = time.process_time()
    for path in ("/v1/" + "%25" * 20_000, "/v1" + "/x/.." * 10_000, "/v1/" + "load" * 15_000, "/v1" + "/" * 60_000):
        Paths().kind(path)
    assert time.process_time() - began < 1
