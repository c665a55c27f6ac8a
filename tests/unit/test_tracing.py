"""When there are traces, and that nothing is spent where there are none. What they say: proxy/test_traces.py."""

from __future__ import annotations

import subprocess
import sys

from app.turn.tracing import is_wanted, open_tracing
from tests.support.rows import rows

_OFF = """
import asyncio, sys
from app.config import Settings
from app.main import create_app
app = create_app(Settings.flat(worker=("http://127.0.0.1:9",), claims="memory://", probe_path="off", models_interval=0))
async def main():
    async with app.router.lifespan_context(app):
        assert app.turns.shared.tracing is None and app.tracing is None
asyncio.run(main())
theirs = {f"opentelemetry.{part}" for part in ("sdk", "exporter", "proto")}
print(sorted(theirs & {".".join(name.split(".")[:2]) for name in sys.modules}))
"""


def test_nothing_of_it_is_imported_where_it_is_not_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", _OFF], capture_output=True, text=True, timeout=100)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@rows(
    ("endpoint", "variables", "wanted"),
    [
        (None, {}, False),
        ("http://c:4318", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        (None, {"OTEL_SERVICE_NAME": "x"}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_when_spans_are_made(endpoint: str | None, variables: dict[str, str], wanted: bool) -> None:
    assert is_wanted(endpoint, variables) is wanted


def test_another_protocol_is_not_spoken() -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert open_tracing(None, variables, replica="r", version="1") is None
