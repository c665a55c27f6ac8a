"""What an error of etcd or gRPC means, and so what may be tried again: the one place that holds this law."""

from __future__ import annotations

import enum

import grpc

from backends.base import OutcomeUnknown, StoreError, StoreUnavailable


class Fault(enum.Enum):
    NOT_SENT = enum.auto()
    """No connection: surely not applied; the next endpoint may do."""
    NOT_NOW = enum.auto()
    """Surely not applied, and likely to work in a moment."""
    DOUBTFUL = enum.auto()
    """Late, or broken off: perhaps applied."""
    LOGIN = enum.auto()
    """Surely not applied; a new login may help."""
    FULL = enum.auto()
    NO_LEASE = enum.auto()
    REFUSED = enum.auto()
    """Surely not applied, and it would be refused again."""


class Full(StoreUnavailable):
    """etcd has no space (NOSPACE): it refuses what would need some."""


class NoLease(StoreUnavailable):
    """The lease that a write names is gone."""


class Refused(StoreUnavailable):
    """It would be refused again."""


_BY_TEXT = (
    ("failed to connect to all addresses", Fault.NOT_SENT),
    ("errors resolving", Fault.NOT_SENT),
    ("DNS resolution failed", Fault.NOT_SENT),
    ("etcdserver: no leader", Fault.NOT_NOW),
    ("etcdserver: leader changed", Fault.NOT_NOW),
    ("etcdserver: too many requests", Fault.NOT_NOW),
    ("etcdserver: invalid auth token", Fault.LOGIN),
    ("etcdserver: revision of auth store is old", Fault.LOGIN),
    ("auth: revision in header is old", Fault.LOGIN),  # the same in the words of 3.5, as UNKNOWN
    ("etcdserver: user name is empty", Fault.LOGIN),
    ("etcdserver: mvcc: database space exceeded", Fault.FULL),
    ("etcdserver: requested lease not found", Fault.NO_LEASE),
)
"""What etcd (v3rpc/rpctypes/error.go) and gRPC say before anything was proposed, or while refusing to apply it."""

_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


def judge(error: grpc.aio.AioRpcError) -> Fault:
    """Whatever is not known to be harmless is doubtful."""
    text = error.details() or ""
    for start, fault in _BY_TEXT:
        if text.startswith(start):
            return fault
    return Fault.REFUSED if error.code() in _REFUSALS else Fault.DOUBTFUL


def failure(doubtful: object, text: str) -> StoreError:
    """What a caller hears when there was no answer: of a write that may have been applied, something else."""
    if doubtful:
        return OutcomeUnknown(f"etcd may or may not have done it: {text}")
    return StoreUnavailable(f"etcd: {text}")
