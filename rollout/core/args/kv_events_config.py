"""`--kv-events-config`: where events of the prefix cache are published, as SGLang and vLLM spell it."""

from __future__ import annotations

import ipaddress
from typing import Any, Literal

import msgspec

from rollout.core.errors import StartupError

BLOCK_SIZE = 1
"""Tokens of a block: the prefix cache matches single tokens."""
REPLAY_BYTES = 128 << 20
"""Bytes that batches kept for replay may take on each data-parallel rank: some ten million tokens, of 13 bytes each."""
_FLAG = "--kv-events-config"
_WILDCARDS = ("*", "0.0.0.0", "[::]")


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`bind` null: bind wildcard hosts and `ipc://`, connect to any other address.  Data-parallel rank r uses the ports
    plus r.
    """

    publisher: Literal["zmq", "null"] = "zmq"
    enable_kv_cache_events: bool = True  # vLLM's switch
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches kept for replay, of `REPLAY_BYTES` at most
    hwm: int = (
        1_000  # batches that may wait for a subscriber before it loses some: ZMQ's own default, as their bytes count
    )
    max_queue_size: int = 100_000  # no effect: nothing waits to be published
    topic: str = ""
    format: Literal["default", "dynamo"] = "default"  # dynamo: SGLang's `cache_salt` with vLLM's `extra_keys`
    weight_versions: bool = False  # our own: events carry the weight version, which strict subscribers refuse

    @property
    def is_bound(self) -> bool:
        if self.bind is not None:
            return self.bind
        return self.endpoint.startswith("ipc://") or _host_port(self.endpoint)[0] in _WILDCARDS

    def endpoint_of(self, dp_rank: int) -> str:
        return _shifted(self.endpoint, dp_rank)

    def replay_endpoint_of(self, dp_rank: int) -> str | None:
        return None if self.replay_endpoint is None else _shifted(self.replay_endpoint, dp_rank)

    def description(self, dp_size: int) -> dict[str, Any]:
        """Return what /server_info tells a router, which puts the worker's host in the place of a wildcard."""
        facts: dict[str, Any] = {"publisher": self.publisher, "topic": self.topic, "block_size": BLOCK_SIZE}
        if self.endpoint.startswith("ipc://"):
            return facts | {"endpoint": self.endpoint, "dp_size": dp_size}
        host, port = _host_port(self.endpoint)
        facts |= {"endpoint_host": host, "endpoint_port_base": port, "dp_size": dp_size}
        if self.replay_endpoint is not None:
            facts["replay_endpoint_port_base"] = _host_port(self.replay_endpoint)[1]
        return facts


def parse_kv_events(text: str | None, dp_size: int, may_be_read_by_all: bool) -> KVEventsConfig | None:
    """Return the configuration, or None where no events are to be published.

    Raises `StartupError`, also where machines that the settings do not name could read the tokens of all requests,
    unless `may_be_read_by_all`.
    """
    if not text:
        return None
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.DecodeError as error:
        raise StartupError(f"{_FLAG}: {error}") from None
    if config.publisher == "null" or not config.enable_kv_cache_events:
        return None
    if config.buffer_steps < 1 or config.hwm < 1:
        raise StartupError(f"{_FLAG}: buffer_steps and hwm must be at least 1")
    bound = [config.endpoint] if config.is_bound else []
    ranges = []
    for endpoint in (config.endpoint, config.replay_endpoint):
        if endpoint is None or (endpoint.startswith("ipc://") and dp_size == 1):
            continue
        _, port = _host_port(endpoint)
        ranges.append(range(port, port + dp_size))
        if port + dp_size - 1 > 65535:
            raise StartupError(f"{_FLAG}: {endpoint} leaves no ports for {dp_size} data-parallel ranks")
    if len(ranges) == 2 and set(ranges[0]) & set(ranges[1]):
        raise StartupError(f"{_FLAG}: endpoint and replay_endpoint need {dp_size} ports each, but overlap")
    for endpoint in bound + ([config.replay_endpoint] if config.replay_endpoint else []):
        if not may_be_read_by_all and not _is_local(endpoint):
            raise StartupError(
                f"{_FLAG}: every host that can reach {endpoint} can read the tokens of all requests. Bind 127.0.0.1 "
                '("endpoint": "tcp://127.0.0.1:5557", "bind": true) or give --allow-unauthenticated.'
            )
    return config


def _host_port(endpoint: str) -> tuple[str, int]:
    """Return host and port of `endpoint`.  Raises `StartupError` unless it is tcp://HOST:PORT."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise StartupError(f"{_FLAG}: {endpoint!r} is not tcp://HOST:PORT (or ipc://PATH, with one data-parallel rank)")
    return host, int(port)


def _shifted(endpoint: str, dp_rank: int) -> str:
    if endpoint.startswith("ipc://"):
        return endpoint
    host, port = _host_port(endpoint)
    return f"tcp://{host}:{port + dp_rank}"


def _is_local(endpoint: str) -> bool:
    if endpoint.startswith("ipc://"):
        return True
    host = _host_port(endpoint)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
