"""Events of the prefix cache over ZMQ, for routers that send a request to the engine that has its prefix.

Names of blocks and form of batches follow SGLang and vLLM.

    topic | sequence number, 8 bytes | msgpack [time, events, data-parallel rank]

A block is one token.  Its name depends on all tokens before it, on the request's salt and on the version of the weights
that computed it.  This is the version at their commit, as renaming a version later changes no block.  A commit makes
all blocks useless, so it is an `AllBlocksCleared`; KV of older weights that running requests still hold has no further
events.

With recurrent layers or windows a request goes on from a snapshot.  So blocks are stored up to the last snapshot of a
path; when that snapshot is dropped, the blocks after the one before it are removed.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from itertools import islice

import msgspec
import numpy as np
import zmq

from rollout.core.adapter_names import adapter_of_key
from rollout.core.args.kv_events_config import BLOCK_SIZE, REPLAY_BYTES, KVEventsConfig
from rollout.core.errors import StartupError
from rollout.memory.radix_node import Namespace, RadixNode

_MEDIUM = "GPU"  # SGLang's and vLLM's name for the memory that forwards read
_POSITION_SHIFT = np.int64(32)
_ONE, _GOLDEN, _LAST_SHIFT = np.uint64(1), np.uint64(0x9E3779B97F4A7C15), np.uint64(31)
_ROUNDS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_NOT_NEGATIVE = 2**63 - 1  # some subscribers read signed numbers, some unsigned ones
_REPLAY_HWM = 1_000  # messages that may wait for one peer; the rest of the answer follows in later turns
_MAX_ASKED = 16  # requests for a replay that are answered at a time
_NO_MORE = (-1).to_bytes(8, "big", signed=True)


class _Event(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """A map with its class name as `type`.  A field that has its default value is left out."""


class BlockStored(_Event):
    """Blocks in a row, the first below `parent_block_hash`, or at the root of its salt (None).

    `extra_keys`, vLLM's form of the salt, has one entry for each block; all are None but the first below a root.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    lora_name: str | None
    medium: str
    extra_keys: list[list[str] | None] | None = None
    cache_salt: str | None = None
    weight_version: str | None = None
    weight_epoch: int | None = None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(_Event):
    """The end of all blocks, by a commit or a flush.  The version and the epoch apply to later blocks."""

    weight_version: str | None = None
    weight_epoch: int | None = None


class _Asked(msgspec.Struct):
    """A request for the batches from `number` up to `end`, not included.  Earlier ones were sent already."""

    identity: bytes
    number: int
    end: int


class KVEvents:
    """Collects the events of the prefix cache, and publishes them once a turn of the scheduler's loop.

    The cache notifies it whenever the prefixes change from which a request can go on.  Without snapshots these are all
    prefixes.  With snapshots they are the prefixes up to the last snapshot of each path.
    """

    def __init__(self, config: KVEventsConfig, dp_rank: int, serving: Callable[[], tuple[str, int]]) -> None:
        """Open the sockets.  `serving()`: the published weight version and weight epoch.  Raises `StartupError`."""
        self.num_batches = 0  # also the sequence number of the next one
        self._config = config
        self._dp_rank = dp_rank
        self._serving = serving
        self._committed = serving()  # version and epoch at the last commit
        self._topic = config.topic.encode()
        self._events: list[_Event] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._pub = self._open(zmq.PUB, config.endpoint_of(dp_rank), config.is_bound, config.hwm)
        self._sent: deque[tuple[int, bytes]] = deque()
        self._sent_bytes = 0
        self._asked: list[_Asked] = []
        self._replay: zmq.Socket[bytes] | None = None
        replay = config.replay_endpoint_of(dp_rank)
        if replay is not None:
            self._replay = self._open(zmq.ROUTER, replay, True, _REPLAY_HWM)
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message that does not fit is refused, not lost
        self.cleared()

    def _open(self, kind: int, endpoint: str, bind: bool, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartupError(f"--kv-events-config: {endpoint}: {error.strerror}") from None
        return socket

    # --- from the prefix cache -----------------------------------------------------------------------------------

    def stored(self, node: RadixNode, namespace: Namespace, end: int) -> None:
        """Add the event that requests can go on from more of `node`: its first `end` tokens.  Name their blocks."""
        parent, start = node.parent, len(node.block_hashes)
        assert parent is not None
        tokens = node.tokens[start:end]
        is_first = parent.parent is None and start == 0
        before = node.block_hashes if start else parent.block_hashes
        above = _root_name(namespace[0], self._committed[0]) if is_first else int(before[-1])
        names = block_names(above, _depth(parent) + start, tokens)
        node.block_hashes = np.concatenate([node.block_hashes, names]) if start else names
        event = BlockStored(
            block_hashes=names.tolist(),
            parent_block_hash=None if is_first else above,
            token_ids=tokens.tolist(),
            block_size=BLOCK_SIZE,
            lora_id=None,
            lora_name=adapter_of_key(namespace[0]),
            medium=_MEDIUM,
        )
        if namespace[0] is not None:
            salt = namespace[0].removesuffix("\x1f")  # of a request without an extra key
            event.extra_keys = [[salt] if is_first else None, *[None] * (len(tokens) - 1)]
            event.cache_salt = salt if self._config.format == "dynamo" else None
        self._events.append(self._with_version(event))

    def removed(self, node: RadixNode, start: int) -> None:
        """Withdraw the node's named tokens from `start` on: no request can go on from them any more."""
        names = node.block_hashes[start:].tolist()
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes += names
        else:
            self._events.append(BlockRemoved(block_hashes=names, medium=_MEDIUM))

    def cleared(self) -> None:
        """Withdraw everything: all nodes were removed, or can never be matched again."""
        serving = self._serving()
        if serving[1] != self._committed[1]:
            self._committed = serving
        self._events = [self._with_version(AllBlocksCleared())]

    def _with_version(self, event: BlockStored | AllBlocksCleared) -> _Event:
        if self._config.weight_versions:
            event.weight_version, event.weight_epoch = self._committed
        return event

    # --- sending -------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Send the events since the last call, as one batch, and answer requests for older ones.  Never blocks."""
        if self._events:
            payload = self._encoder.encode([time.time(), self._events, self._dp_rank])
            self._pub.send_multipart([self._topic, self.num_batches.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            if self._replay is not None:
                self._keep(payload)
            self.num_batches += 1
            self._events = []
        if self._replay is not None:
            self._take_request(self._replay)
            if self._asked:
                self._answer_all(self._replay)

    def _keep(self, payload: bytes) -> None:
        """Keep the last batches for replay, as many as the limits on batches and bytes allow."""
        self._sent.append((self.num_batches, payload))
        self._sent_bytes += len(payload)
        while len(self._sent) > self._config.buffer_steps or self._sent_bytes > REPLAY_BYTES:
            self._sent_bytes -= len(self._sent.popleft()[1])

    def _take_request(self, socket: zmq.Socket[bytes]) -> None:
        """Take a request [identity, empty, first sequence number], unless the maximum number is being answered."""
        if len(self._asked) == _MAX_ASKED or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        frames = socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) == 3 and len(frames[2]) == 8:
            first = min(int.from_bytes(frames[2], "big"), self.num_batches)
            self._asked.append(_Asked(frames[0], first, self.num_batches))

    def _answer_all(self, socket: zmq.Socket[bytes]) -> None:
        """Answer each request as far as there is room; requests of one peer are answered in order."""
        left: dict[bytes, list[_Asked]] = {}
        for asked in self._asked:
            if asked.identity in left or not self._answer(socket, asked):
                left.setdefault(asked.identity, []).append(asked)
        self._asked = [asked for waiting in left.values() for asked in waiting]

    def _answer(self, socket: zmq.Socket[bytes], asked: _Asked) -> bool:
        """Send one message for each batch, and -1 at the end; messages without room follow later.

        Returns True once all is sent, or the peer has disconnected.
        """
        skipped = asked.number - self._sent[0][0] if self._sent else 0
        try:
            for number, payload in islice(self._sent, max(0, skipped), None):
                if number >= asked.end:
                    break
                socket.send_multipart([asked.identity, b"", number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
                asked.number = number + 1
            socket.send_multipart([asked.identity, b"", _NO_MORE, b""], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
        return True

    def close(self) -> None:
        self._context.destroy(linger=0)


def block_names(above: int, depth: int, tokens: np.ndarray) -> np.ndarray:
    """Return the names int64 [n] of the blocks of `tokens` [n], of which the first has `depth` tokens before it.

    `above` is the name of the block before, or of the root.  A name is the root's name plus a hash (splitmix64) of each
    (position, token) up to it, modulo 2^63.  So it does not depend on where the tree's edges begin.  Names are not
    collision-resistant: a client that chooses prompts can find two with one name.
    """
    mixed = np.arange(depth, depth + len(tokens))
    mixed <<= _POSITION_SHIFT
    mixed ^= tokens
    mixed = mixed.view(np.uint64)
    mixed += _ONE
    mixed *= _GOLDEN
    for shift, factor in _ROUNDS:
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> _LAST_SHIFT
    names = mixed.cumsum().view(np.int64)
    names += above
    names &= _NOT_NEGATIVE
    return names


def _root_name(extra_key: str | None, weight_version: str) -> int:
    digest = blake2b(msgspec.msgpack.encode([extra_key, weight_version]), digest_size=8).digest()
    return int.from_bytes(digest, "big") & _NOT_NEGATIVE


def _depth(node: RadixNode | None) -> int:
    """Return the number of tokens from the root to the end of `node`."""
    depth = 0
    while node is not None:
        depth += len(node)
        node = node.parent
    return depth
