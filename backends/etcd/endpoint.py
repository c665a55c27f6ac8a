"""One address of etcd: how it is connected to, and how it has answered."""

from __future__ import annotations

from typing import Any

import grpc
from aetcd import rpc

from backends.etcd.url import EtcdUrl


class Endpoint:
    """One member: its channel and the calls we make on it. Made inside the running loop, as gRPC wants it."""

    def __init__(self, target: str, url: EtcdUrl, credentials: grpc.ChannelCredentials | None) -> None:
        options: list[tuple[str, Any]] = [
            ("grpc.keepalive_time_ms", 10_000),  # etcd ends connections that ping more often than every 5 s,
            ("grpc.keepalive_timeout_ms", 3_000),
            ("grpc.http2.ping_timeout_ms", 3_000),  # newer gRPC wants both, or waits for a minute
            ("grpc.keepalive_permit_without_calls", 0),  # or that ping without a call.
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1_000),  # in fact the time a connection attempt gets
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.use_local_subchannel_pool", 1),  # no other cluster's connections and backoffs
            ("grpc.enable_http_proxy", 0),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.max_receive_message_length", -1),  # as etcd's own client; garbage may be large
        ]
        if url.server_name:
            options.append(("grpc.ssl_target_name_override", url.server_name))
        self.target = target
        self.channel = (
            rpc.secure_channel(target, credentials, options=options)
            if credentials
            else rpc.insecure_channel(target, options=options)
        )
        kv, lease = rpc.KVStub(self.channel), rpc.LeaseStub(self.channel)
        self.range = kv.Range
        self.txn = kv.Txn
        self.lease_grant = lease.LeaseGrant
        self.lease_time_to_live = lease.LeaseTimeToLive
        self.authenticate = rpc.AuthStub(self.channel).Authenticate
        self.watch = rpc.WatchStub(self.channel).Watch
        self.suspect_until = 0.0
        self.answered = 0.0
        """When the latest of its answered attempts began: one that began before and has no answer is late alone."""
