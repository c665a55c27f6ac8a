"""What a worker tells of its engine: at `/metrics` by vLLM's names, at `/mock/engine` for tests.

The names are those of vLLM's V1 engine (https://docs.vllm.ai/en/v0.32.0/usage/metrics/). Without an engine there are no
blocks, and what runs is counted by the turns.
"""

from __future__ import annotations

from typing import Any

from mocker.engine.scheduler import Scheduler
from mocker.turns import TurnService

_REFUSED = "vllm:admission_rejections_total"


def exposition(service: TurnService) -> str:
    """In Prometheus' text format."""
    lines = []
    model = _escaped(service.settings.models[0])
    for name, kind, values in _families(service):
        lines.append(f"# TYPE {name} {kind}")
        reason = ',reason="max_num_queued_reqs"' if name == _REFUSED else ""
        lines += (f'{name}{{engine="{rank}",model_name="{model}"{reason}}} {of}' for rank, of in enumerate(values))
    return "\n".join(lines) + "\n"


def state(service: TurnService) -> list[dict[str, Any]]:
    """Of each rank of the engine."""
    found = []
    for number, rank in enumerate(service.ranks):
        scheduler = rank.scheduler
        cache, profile = scheduler.cache, scheduler.profile
        publisher = service.publishers[number] if service.publishers else None
        found.append(
            {
                "profile": profile.name,
                "block_size": profile.block_size,
                "blocks": cache.blocks,
                "free": cache.free,
                "cached": cache.cached,
                "idle": cache.idle,
                "running": scheduler.running,
                "waiting": scheduler.waiting,
                "preemptions": scheduler.counters.preemptions,
                "kv_events": None if publisher is None else publisher.endpoint,
                "kv_replay": None if publisher is None else publisher.replay_endpoint,
            }
        )
    return found


def _families(service: TurnService) -> list[tuple[str, str, list[float]]]:
    ranks = [rank.scheduler for rank in service.ranks]
    if not ranks:
        return [
            ("vllm:num_requests_running", "gauge", [service.log.active]),
            ("vllm:num_requests_waiting", "gauge", [0]),
        ]

    def each(name: str) -> list[float]:
        return [getattr(rank.counters, name) for rank in ranks]

    return [
        ("vllm:num_requests_running", "gauge", [rank.running for rank in ranks]),
        ("vllm:num_requests_waiting", "gauge", [rank.waiting for rank in ranks]),
        ("vllm:kv_cache_usage_perc", "gauge", [_usage(rank) for rank in ranks]),
        ("vllm:prefix_cache_queries_total", "counter", each("queries")),
        ("vllm:prefix_cache_hits_total", "counter", each("hits")),
        ("vllm:prompt_tokens_total", "counter", each("prompts")),
        ("vllm:generation_tokens_total", "counter", each("generated")),
        ("vllm:num_preemptions_total", "counter", each("preemptions")),
        (_REFUSED, "counter", each("refused")),
    ]


def _usage(scheduler: Scheduler) -> float:
    return scheduler.cache.used / scheduler.cache.blocks


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
