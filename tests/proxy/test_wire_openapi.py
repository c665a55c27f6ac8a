"""The control plane against its own description: whatever is asked there, the answer is one that `/openapi.json`
declares, and never a fault of the router."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings

from tests.support.examples import examples
from tests.support.raw import Live

if TYPE_CHECKING:
    import schemathesis

MODELS = {"object": "list", "data": [{"id": name, "object": "model"} for name in ("m", "org/m", "caf\u00e9 %2F?")]}


class ModelList(BaseHTTPRequestHandler):
    """A worker that tells its models and nothing else."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps(MODELS).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with ThreadingHTTPServer(("127.0.0.1", 0), ModelList) as worker:
        serving = threading.Thread(target=worker.serve_forever, args=(0.05,))
        serving.start()
        try:
            with Live(workers=0, worker=(f"http://127.0.0.1:{worker.server_port},name=w",)) as live:
                yield live
        finally:
            worker.shutdown()
            serving.join()


@pytest.fixture(scope="module")
def control_plane(live: Live) -> schemathesis.BaseSchema:
    import schemathesis  # takes seconds, and most processes of a parallel run only collect this module

    url = f"http://127.0.0.1:{live.port}"
    with _session() as session:
        described = session.get(f"{url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(described)
    schema.config.update(base_url=url)
    return schema


def _session() -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # the environment's proxies are for the internet
    return session


@pytest.fixture(scope="module")
def checks() -> list[Any]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    return [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
        checks.unsupported_method,
    ]


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with _session() as session:
        yield session


OPERATIONS = [
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/admin/session"),
    ("DELETE", "/admin/session"),
    ("GET", "/admin/sessions"),
    ("GET", "/admin/replicas"),
    ("GET", "/admin/workers"),
    ("POST", "/admin/workers"),
    ("POST", "/admin/workers/{name}/release"),
    ("POST", "/admin/workers/{name}/{word}"),
]


AS_DESCRIBED = [(*operation, "positive") for operation in OPERATIONS]
OTHERWISE = [(*operation, "negative") for operation in OPERATIONS if "/admin/session" in operation[1]]
"""Of what can be wrong: a query."""


@pytest.mark.parametrize(("method", "path", "mode"), AS_DESCRIBED + OTHERWISE)
def test_every_answer_is_one_that_is_declared(
    control_plane: schemathesis.BaseSchema,
    checks: list[Any],
    session: requests.Session,
    method: str,
    path: str,
    mode: str,
) -> None:
    from schemathesis import GenerationMode

    operation = control_plane[path][method]

    @settings(max_examples=examples(10), deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def asked(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(checks=checks, session=session)

    asked()


def test_everything_that_is_declared_is_asked(control_plane: schemathesis.BaseSchema) -> None:
    assert sorted(OPERATIONS) == sorted(
        (found.ok().method.upper(), found.ok().path)  # type: ignore[union-attr]
        for found in control_plane.get_all_operations()
        if found.ok().path != "/admin/stream"  # type: ignore[union-attr]  # which does not end
    )
