"""Spans of turns, by OpenTelemetry's SDK, for the extra `coatcheck[otel]`: a turn, within it how it came to its target,
and each attempt, whose context its worker is sent (W3C Trace Context).

Nothing of the SDK is imported before `open_tracing` is told to. Spans leave in batches, by a thread of the SDK's own. A
provider of our own, not the process's: what else is instrumented in it stays as it is.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from app.fleet.discovery.source import Aside
from app.fleet.workers import Target
from app.http.exchange import Exchange
from app.http.headers import Header
from app.metrics import TurnOutcome

log = logging.getLogger("coatcheck.traces")

# The SDK's, which is not imported here.
Context: TypeAlias = Any
Span: TypeAlias = Any
TracerProvider: TypeAlias = Any

TRACEPARENT = b"traceparent"
_STATE = b"tracestate"
_PATH = "/v1/traces"
"""Where a receiver of OTLP over HTTP takes spans."""
_LAST_BATCH = 5.0
"""Seconds that what was not sent yet may take at the end."""
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_FAILED: frozenset[TurnOutcome] = frozenset({"worker_error", "broken", "unplaced", "failed"})


def is_installed() -> bool:
    """Whether the extra is there."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:  # of a parent
        return False


def is_wanted(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """Whether spans are to be made: an `endpoint` is set, or OpenTelemetry's own variables name one, and none of those
    says no."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() != "otlp":
        return False
    return endpoint is not None or any(environment.get(name) for name in _ENDPOINTS)


def open_tracing(endpoint: str | None, environment: Mapping[str, str], *, replica: str, version: str) -> Tracing | None:
    """None: no spans are wanted. `endpoint`: the receiver's URL, its path /v1/traces unless it has one; None: as
    OpenTelemetry's variables say, which all else is left to (headers, sampling, batches, attributes of the service).
    The caller closes it."""
    if not is_wanted(endpoint, environment):
        return None
    if not is_installed():
        log.warning("there are no traces: install coatcheck[otel], or take OTEL_EXPORTER_OTLP_ENDPOINT away")
        return None
    if endpoint is None:
        protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
        if protocol != "http/protobuf":
            log.warning("there are no traces: OTLP is sent as http/protobuf here, and %s is wanted", protocol)
            return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if endpoint is not None and not endpoint.partition("://")[2].partition("/")[2]:
        endpoint = endpoint.rstrip("/") + _PATH
    said = {"service.version": version, "service.instance.id": replica}
    if not environment.get("OTEL_SERVICE_NAME") and "service.name=" not in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        said["service.name"] = "coatcheck"
    provider = TracerProvider(resource=Resource.create(said), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)


class Tracing:
    """Makes the spans of turns."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("coatcheck")
        self._propagator = TraceContextTextMapPropagator()
        self._kinds, self.error, self.within = SpanKind, StatusCode.ERROR, set_span_in_context

    def begin(self, exchange: Exchange) -> TurnTrace:
        """The trace of a turn that begins."""
        carrier: dict[str, str] = {}
        for name, value in exchange.headers:
            if name in (TRACEPARENT, _STATE):
                key, text = name.decode(), value.decode("latin-1")
                carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
        method, path = exchange.method.decode("latin-1"), exchange.raw_path.decode("latin-1")
        span = self._tracer.start_span(
            f"{method} {path[:100]}",
            context=self._propagator.extract(carrier),
            kind=self._kinds.SERVER,
            attributes={"http.request.method": method, "url.path": path, "url.scheme": exchange.scheme.decode()},
        )
        return TurnTrace(self, span)

    def child(
        self, name: str, context: Context, *, calls: bool = False, since: int | None = None, **attributes: Any
    ) -> Span:
        """`since`: nanoseconds of the clock; None: now. Two underscores in an attribute's name mean a dot."""
        kind = self._kinds.CLIENT if calls else self._kinds.INTERNAL
        said = {key.replace("__", "."): value for key, value in attributes.items() if value is not None}
        return self._tracer.start_span(name, context=context, kind=kind, attributes=said, start_time=since)

    def header_of(self, span: Span) -> Header:
        """What says to a worker that it works for `span`; `tracestate` goes on as it came."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self.within(span))
        return TRACEPARENT, carrier[TRACEPARENT.decode()].encode()

    async def aclose(self) -> None:
        """What has ended is sent, as far as somebody takes it in a few seconds."""
        try:
            await Aside("traces").run(self._provider.shutdown, _LAST_BATCH)
        except TimeoutError:
            log.warning("the last spans were not taken within %g s", _LAST_BATCH)


class TurnTrace:
    """The spans of one turn, told by it what happens. Its methods are called in this order; `end` once, and last."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing, self._span = tracing, span
        self._context = tracing.within(span)
        self._step: Span | None = None
        """What the turn is at: its binding, or an attempt."""
        self._binds = False
        """It is the binding."""
        self._since: int | None = None
        """When the last step ended."""
        self._attempts: Counter[str] = Counter()
        """By their names: the first of each kind repeats nothing."""

    def binds(self) -> None:
        """The target is looked for from now on."""
        self._end_step()
        self._step, self._binds = self._tracing.child("binding", self._context, since=self._since), True

    def goes(self, how: str) -> None:
        """It was found, or another one after an attempt has failed."""
        if not self._binds:
            self.binds()
        if self._step is not None:
            self._step.set_attribute("coatcheck.affinity", how)
        self._end_step()

    def attempts(self, target: Target, name: str = "attempt") -> Header:
        """An attempt begins, or something like it. Answers the header for its worker."""
        self._end_step()
        self._step = self._tracing.child(
            name,
            self._context,
            calls=True,
            coatcheck__worker=target.worker.name,
            coatcheck__rank=target.rank,
            http__request__resend_count=self._attempts[name] or None,
        )
        self._attempts[name] += 1
        return self._tracing.header_of(self._step)

    def beside(self, target: Target) -> BesideSpan:
        """A worker computes the prompt while an attempt is under way."""
        span = self._tracing.child(
            "prefill",
            self._context,
            calls=True,
            coatcheck__worker=target.worker.name,
            coatcheck__rank=target.rank,
            http__request__resend_count=self._attempts["prefill"] or None,
        )
        self._attempts["prefill"] += 1
        return BesideSpan(self._tracing, span)

    def answered(self, status: int) -> None:
        """The worker has begun to answer the attempt."""
        assert self._step is not None
        self._step.set_attribute("http.response.status_code", status)
        self._step.add_event("head")
        if status >= 500:
            self._step.set_status(self._tracing.error)

    def failed(self, failure: Exception) -> None:
        """The attempt has, or its answer will not be completed."""
        if self._step is not None:
            self._step.set_status(self._tracing.error, str(failure))
            self._step.set_attribute("error.type", type(failure).__name__)
            self._end_step()

    def end(self, outcome: TurnOutcome, **attributes: str | int | float | None) -> None:
        """Of the turn; `attributes` as those of `Tracing.child`."""
        if self._step is not None and outcome in _FAILED:
            self._step.set_status(self._tracing.error)
        self._end_step()
        span = self._span
        span.set_attribute("coatcheck.outcome", outcome)
        span.set_attribute("coatcheck.attempts", self._attempts.total())
        for name, value in attributes.items():
            if value is not None:
                span.set_attribute(name.replace("__", "."), value)
        if outcome in _FAILED:
            span.set_status(self._tracing.error, outcome)
        span.end()

    def _end_step(self) -> None:
        step, self._step, self._binds = self._step, None, False
        if step is not None:
            self._since = time.time_ns()
            step.end(self._since)


class BesideSpan:
    """What another worker does meanwhile."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing, self._span = tracing, span
        self.header = tracing.header_of(span)

    def end(self, status: int, failure: Exception | None) -> None:
        """`status`: of its answer; 0: there was none."""
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if failure is not None:
            self._span.set_attribute("error.type", type(failure).__name__)
        if failure is not None or status >= 500:
            self._span.set_status(self._tracing.error, None if failure is None else str(failure))
        self._span.end()
