"""A router's half of KV events: the prefix tree rebuilt from events alone.

Written from the field names of SGLang and vLLM; knows nothing of how blocks are named.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

NO_MORE = 2**64 - 1
Parent = int | tuple[str, str | None]  # the block before, or ("root", salt)


class PrefixTree:
    """Blocks of one token, from batches that come in order."""

    def __init__(self) -> None:
        self.next_number = 0
        self.blocks: dict[int, tuple[Parent, int]] = {}
        self.below: dict[tuple[Parent, int], int] = {}
        self.versions: list[tuple[str | None, int | None]] = []
        """(weight version, weight epoch) of each time that everything was cleared, where known."""

    def take(self, number: int, payload: bytes) -> None:
        assert number == self.next_number, "a batch is missing"
        stamp, events, dp_rank = msgspec.msgpack.decode(payload)
        assert abs(time.time() - stamp) < 3600 and dp_rank == 0
        for event in events:
            self._apply(event)
        self.next_number += 1

    def _apply(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "BlockStored":
            assert event["block_size"] == 1 and event["medium"] == "GPU"
            assert _version(event) == self.versions[-1]
            parent: Parent = event["parent_block_hash"]
            if parent is None:
                parent = ("root", event["extra_keys"][0][0] if "extra_keys" in event else None)
            else:
                assert parent in self.blocks, "below a block that nobody was told of"
            for name, token in zip(event["block_hashes"], event["token_ids"], strict=True):
                assert name not in self.blocks and (parent, token) not in self.below
                self.blocks[name] = parent, token
                self.below[parent, token] = name
                parent = name
        elif kind == "BlockRemoved":
            for name in event["block_hashes"]:
                del self.below[self.blocks.pop(name)]
        else:
            assert kind == "AllBlocksCleared"
            self.blocks.clear()
            self.below.clear()
            self.versions.append(_version(event))

    def match(self, tokens: list[int], salt: str | None = None) -> int:
        """Return the number of tokens in the longest prefix that is there."""
        parent: Parent = ("root", salt)
        for count, token in enumerate(tokens):
            name = self.below.get((parent, token))
            if name is None:
                return count
            parent = name
        return len(tokens)


def _version(event: dict[str, Any]) -> tuple[str | None, int | None]:
    return event.get("weight_version"), event.get("weight_epoch")


class Listener:
    """Subscribes to one publisher.  Every batch must come, in order."""

    def __init__(self, endpoint: str, topic: str = "", replay: str | None = None) -> None:
        self.tree = PrefixTree()
        self._replay = replay
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)

    def catch_up(self, num_batches: int, timeout_s: float = 10.0) -> None:
        """Take batches until `num_batches` have been seen."""
        deadline = time.monotonic() + timeout_s
        while self.tree.next_number < num_batches:
            assert time.monotonic() < deadline, "a batch did not come"
            if self._socket.poll(500):
                _, number, payload = self._socket.recv_multipart()
                self._take(int.from_bytes(number, "big"), payload)
            else:  # sent before the subscription was there
                self._fill_in()

    def _take(self, number: int, payload: bytes) -> None:
        if number > self.tree.next_number:
            self._fill_in()
        if number == self.tree.next_number:
            self.tree.take(number, payload)

    def _fill_in(self) -> None:
        assert self._replay is not None, f"batch {self.tree.next_number} is missing"
        for number, payload in ask_replay(self._context, self._replay, self.tree.next_number):
            self.tree.take(number, payload)

    def close(self) -> None:
        self._context.destroy(linger=0)


def ask_replay(context: zmq.Context, endpoint: str, first: int) -> list[tuple[int, bytes]]:
    """Request the batches from number `first` on that the publisher still has."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while True:
            assert socket.poll(5000), "no answer to a replay request"
            _, number, payload = socket.recv_multipart()
            if int.from_bytes(number, "big") == NO_MORE:
                return batches
            batches.append((int.from_bytes(number, "big"), payload))
