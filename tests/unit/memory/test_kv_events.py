"""Events of the prefix cache: names of blocks, the tree that they describe, replay, and settings that are refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import pytest
import zmq

from rollout.core.adapter_names import key_of_kv
from rollout.core.args.checks import check_settings
from rollout.core.args.kv_events_config import parse_kv_events
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.messages.weights import BeginWeightUpdateReqInput, EndWeightUpdateReqInput
from rollout.memory import kv_events
from rollout.memory.kv_events import KVEvents, block_names
from rollout.memory.kv_pool import SlotAllocator
from rollout.memory.radix_cache import RadixCache
from tests.kv_listener import PrefixTree, ask_replay
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness

SLOTS = 300


def replayed(
    context: zmq.Context, endpoint: str, turn: Callable[[], object], first: int = 0
) -> list[tuple[int, bytes]]:
    """Return what a publisher in this thread, which takes its turns meanwhile, still has from number `first` on."""
    box: list[list[tuple[int, bytes]]] = []
    thread = threading.Thread(target=lambda: box.append(ask_replay(context, endpoint, first)))
    thread.start()
    while thread.is_alive():
        turn()
        thread.join(0.01)
    return box[0]


class Rig:
    """A prefix cache, its publisher and a listener."""

    def __init__(self, folder: Path, **config: object) -> None:
        self.version = ("v0", 0)
        self.endpoint, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        text = json.dumps({"endpoint": self.endpoint, "replay_endpoint": self.replay} | config)
        parsed = parse_kv_events(text, 1, False)
        assert parsed is not None
        self.events = KVEvents(parsed, 0, lambda: self.version)
        self.allocator = SlotAllocator(SLOTS)
        self.cache = RadixCache(self.allocator, self.events)
        self.context = zmq.Context()

    def publish(self) -> None:
        self.events.publish()

    def replayed(self, first: int = 0) -> list[tuple[int, bytes]]:
        return replayed(self.context, self.replay, self.publish, first)

    def insert(self, tokens: list[int], salt: str | None = None) -> None:
        array = np.array(tokens, dtype=np.int64)
        if self.allocator.num_free < len(array):
            self.cache.evict(len(array) - self.allocator.num_free)
        slots = self.allocator.alloc(len(array))
        _, known = self.cache.insert((salt, self.version[1]), array, slots)
        self.allocator.free(slots[:known])

    def match(self, tokens: list[int], salt: str | None = None) -> int:
        return self.cache.match((salt, self.version[1]), np.array(tokens, dtype=np.int64))[1].shape[0]

    def close(self) -> None:
        self.events.close()
        self.context.destroy(linger=0)


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """A function that makes rigs.  They are closed in the end, because an open socket would block the exit."""
    with ExitStack() as stack:
        yield lambda **config: stack.enter_context(closing(Rig(tmp_path, **config)))


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs(weight_versions=True)


def tree_of(batches: list[tuple[int, bytes]]) -> PrefixTree:
    tree = PrefixTree()
    for number, payload in batches:
        tree.take(number, payload)
    return tree


def test_the_tree_of_a_listener_is_the_cache(rig: Rig) -> None:
    """Random inserts under three salts with evictions, locks, flushes and commits."""
    rng = np.random.default_rng(7)
    prompts: list[tuple[list[int], str | None]] = []
    for step in range(400):
        salt = rng.choice([None, "a", "b"])  # type: ignore[arg-type]
        base, shared = ([], 0) if not prompts or rng.random() < 0.2 else (prompts[rng.integers(len(prompts))][0], 0)
        shared = int(rng.integers(len(base) + 1))
        tokens = base[:shared] + rng.integers(0, 4, size=rng.integers(1, 40)).tolist()
        prompts.append((tokens, salt))
        rig.insert(tokens, salt)
        if step % 50 == 25:
            rig.version = (f"v{step}", rig.version[1] + 1)
            rig.cache.retire(rig.version[1])
        if step % 97 == 96:
            rig.cache.flush()
        if rng.random() < 0.5:
            rig.publish()
    tree = tree_of(rig.replayed())
    assert len(tree.blocks) == rig.cache.num_cached > 50
    for tokens, salt in prompts:
        assert tree.match(tokens, salt) == rig.match(tokens, salt)
    assert [epoch for _, epoch in tree.versions] == sorted(epoch for _, epoch in tree.versions)
    assert {f"v{step}" for step in range(25, 400, 50)} <= {version for version, _ in tree.versions}


def test_what_was_locked_over_a_commit_is_not_spoken_of_again(rig: Rig) -> None:
    rig.insert([1, 2, 3])
    node, _ = rig.cache.match((None, 0), np.array([1, 2, 3]))
    rig.cache.lock(node)
    rig.publish()
    rig.version = ("v1", 1)
    rig.cache.retire(1)
    rig.publish()
    rig.cache.unlock(node)
    rig.cache.evict(3)
    rig.publish()
    assert rig.events.num_batches == 2, "nothing to say after the commit"
    assert tree_of(rig.replayed()).versions == [("v0", 0), ("v1", 1)]


def test_a_commit_of_the_epoch_in_force_leaves_cache_and_listener_alone(rig: Rig) -> None:
    rig.insert([1, 2, 3])
    rig.cache.retire(0)
    rig.insert([1, 2, 4])
    rig.publish()
    tree = tree_of(rig.replayed())
    assert tree.versions == [("v0", 0)]
    assert tree.match([1, 2, 4]) == rig.match([1, 2, 4]) == tree.match([1, 2, 3]) == 3


def test_a_rename_changes_no_block_until_the_next_commit(rig: Rig) -> None:
    rig.insert([1, 2, 3])
    before = tree_of(rig.replayed()).blocks
    rig.version = ("renamed", 0)
    rig.cache.retire(0)
    rig.insert([1, 2, 4, 5])
    rig.insert([7, 8])
    tree = tree_of(rig.replayed())
    assert tree.versions == [("v0", 0)] and before.items() <= tree.blocks.items()
    assert all(tree.match(tokens) == rig.match(tokens) == len(tokens) for tokens in ([1, 2, 3], [1, 2, 4, 5], [7, 8]))
    rig.cache.flush()
    rig.insert([1, 2, 3])
    assert tree_of(rig.replayed()).blocks == before, "the same tokens under the same weights, whatever their name"
    rig.version = ("v1", 1)
    rig.cache.retire(1)
    rig.insert([1, 2, 3])
    tree = tree_of(rig.replayed())
    assert tree.versions == [("v0", 0), ("v0", 0), ("v1", 1)] and not tree.blocks.keys() & before.keys()


def test_an_update_without_tensors_is_no_news_to_a_listener(tmp_path: Path) -> None:
    """Every prefix stays, as after vLLM's /start_weight_update and /finish_weight_update with nothing between."""
    replay = f"ipc://{tmp_path}/replay"
    config = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": replay, "weight_versions": True}
    harness = Harness(tiny_checkpoint(tmp_path / "m", "moe"), kv_events_config=json.dumps(config))
    events, prompt = harness.scheduler.kv_events, list(range(20, 40))
    assert events is not None
    with closing(events), zmq.Context() as context:
        harness.generate([prompt], {"max_new_tokens": 2})
        for number, label in enumerate((None, "renamed")):
            fields = {"coverage": "partial", "update_id": f"u{number}", "weight_version": label}
            begun = harness.control(BeginWeightUpdateReqInput, **fields)
            assert begun.success, begun.message
            ended = harness.control(EndWeightUpdateReqInput, update_id=f"u{number}")
            assert ended.success and ended.data["num_tensors"] == 0
            longer = [*prompt, *[50 + number] * 5]
            (result,) = harness.generate([longer], {"max_new_tokens": 2})
            assert result.finished is not None and result.finished.cached_tokens == len(prompt)
            tree = tree_of(replayed(context, replay, harness.tick))
            assert tree.match(longer) == len(longer) and tree.versions == [("default", 0)]
        assert harness.scheduler.runner.state.epoch.weight_version == "renamed"


def test_a_name_depends_on_what_comes_before_and_not_on_where_an_edge_begins() -> None:
    tokens = np.random.default_rng(1).integers(0, 150_000, size=500)
    whole = block_names(11, 0, tokens)
    for cut in (1, 250, 499):
        parts = np.concatenate([block_names(11, 0, tokens[:cut]), block_names(int(whole[cut - 1]), cut, tokens[cut:])])
        assert (parts == whole).all()
    assert len(np.unique(whole)) == 500
    other = tokens.copy()
    other[[3, 4]] = other[[4, 3]]
    changed = block_names(11, 0, other)
    assert (changed[:3] == whole[:3]).all() and (changed[3] != whole[3]) and (changed[4:] == whole[4:]).sum() <= 496
    assert not set(block_names(12, 0, tokens).tolist()) & set(whole.tolist())


def test_a_name_depends_on_version_and_salt(rig: Rig) -> None:
    names = []
    for version, salt in ((("v0", 0), None), (("v0", 0), "a"), (("v1", 1), None), (("v1", 2), None)):
        rig.version = version
        rig.cache.retire(version[1])
        rig.insert([5, 6], salt)
        node, _ = rig.cache.match((salt, version[1]), np.array([5, 6]))
        names.append(tuple(node.block_hashes.tolist()))
    assert len(set(names[:3])) == 3
    assert names[2] == names[3], "engines with other counts of commits use the same names"


class VLLMEvent(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """vllm-router refuses a batch with any other field, and one whose hashes are negative."""


Hash = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class BlockStored(VLLMEvent):
    """The fields of vLLM 0.33, required ones without a default; SGLang 0.5.23 has them too, but for `extra_keys`."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(VLLMEvent):
    block_hashes: list[Hash]
    medium: str | None


class AllBlocksCleared(VLLMEvent):
    pass


class Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@pytest.mark.parametrize("key", [None, "extra", "salt\x1f", "salt\x1fextra", key_of_kv("extra", "poet", 2, "d")])
def test_strict_subscribers_read_the_batches(rigs: Callable[..., Rig], key: str | None) -> None:
    rig = rigs()
    rig.insert([4, 5, 6], key)
    rig.insert([4, 5, 7], key)
    rig.cache.evict(1)
    rig.publish()
    ((_, payload),) = rig.replayed()
    cleared, first, second, removed = msgspec.msgpack.decode(payload, type=Batch).events
    assert isinstance(cleared, AllBlocksCleared) and isinstance(removed, BlockRemoved)
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert first.token_ids == [4, 5, 6] and second.token_ids == [7]
    assert first.parent_block_hash is None and second.parent_block_hash == first.block_hashes[1]
    assert removed.block_hashes == [first.block_hashes[2]] and first.medium == removed.medium == "GPU"
    assert first.lora_name == second.lora_name == ("poet" if key is not None and "poet" in key else None)
    if key is None:
        assert first.extra_keys is second.extra_keys is None
    else:
        assert first.extra_keys == [(key.removesuffix("\x1f"),), None, None] and second.extra_keys == [None]


def test_dynamo_s_format_has_the_salt_as_sglang_tells_it(rigs: Callable[..., Rig]) -> None:
    rig = rigs(format="dynamo")
    rig.insert([1, 2], "salt\x1f")
    rig.insert([1, 2])
    rig.publish()
    _, salted, plain = msgspec.msgpack.decode(rig.replayed()[0][1])[1]
    assert salted["cache_salt"] == "salt" and "cache_salt" not in plain


def test_replay_has_the_last_batches(rigs: Callable[..., Rig]) -> None:
    rig = rigs(buffer_steps=5)
    for token in range(9):
        rig.insert([token])
        rig.publish()
    assert [number for number, _ in rig.replayed()] == [4, 5, 6, 7, 8]
    assert [number for number, _ in rig.replayed(7)] == [7, 8] and rig.replayed(99) == []
    with rig.context.socket(zmq.DEALER) as rude:
        rude.connect(rig.replay)
        for frames in ([b"x"], [b"", b"short"], [b"", b"", b"", b""]):
            rude.send_multipart(frames)
        assert [number for number, _ in rig.replayed(8)] == [8]


def test_replay_keeps_so_many_bytes(rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_BYTES", 20_000)
    rig = rigs()
    for token in range(200):
        rig.cache.flush()
        rig.insert([token] * 100)
        rig.publish()
    batches = rig.replayed()
    assert [number for number, _ in batches] == list(range(200 - len(batches), 200))
    sizes = [len(payload) for _, payload in batches]
    assert 20_000 - max(sizes) <= sum(sizes) <= 20_000


@pytest.mark.parametrize("hwm", [1, 1000])
def test_a_replay_is_longer_than_what_may_wait(rigs: Callable[..., Rig], hwm: int) -> None:
    """It is longer than the system's buffers, too: a late reader gets all batches of its time, and the end."""
    rig = rigs(hwm=hwm)
    for token in range(4000):
        rig.cache.flush()
        rig.insert([token] * 100)
        rig.publish()
    with rig.context.socket(zmq.DEALER) as slow, rig.context.socket(zmq.DEALER) as gone:
        for asker in (slow, gone):
            asker.setsockopt(zmq.LINGER, 0)
            asker.set_hwm(1)
            asker.connect(rig.replay)
            asker.send_multipart([b"", (0).to_bytes(8, "big")])
        slow.send_multipart([b"", (3999).to_bytes(8, "big")])
        for _ in range(100):
            rig.publish()
            time.sleep(0.002)
        gone.close()
        rig.insert([1, 2, 3])
        assert len(rig.replayed(3000)) == 1001, "others do not wait for it"
        numbers: list[int] = []
        deadline = time.monotonic() + 20
        while numbers.count(-1) < 2 and time.monotonic() < deadline:
            rig.publish()
            while slow.poll(1):
                numbers.append(int.from_bytes(slow.recv_multipart()[1], "big", signed=True))
        assert numbers == [*range(4000), -1, 3999, -1]
    for _ in range(20):
        rig.publish()
    assert not rig.events._asked


def test_a_subscriber_that_is_slow_or_gone_holds_nothing_up(rigs: Callable[..., Rig]) -> None:
    rig = rigs(hwm=2, buffer_steps=500)
    deaf = rig.context.socket(zmq.SUB)
    deaf.setsockopt_string(zmq.SUBSCRIBE, "")
    deaf.set_hwm(1)
    deaf.connect(rig.endpoint)
    for token in range(3000):
        rig.cache.flush()
        rig.insert([token % SLOTS] * 50)
        rig.publish()
    deaf.close(linger=0)
    assert rig.events.num_batches == 3000


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("not json", "malformed|expected"),
        ("[]", "Expected"),
        ({"endpint": "tcp://*:1"}, "endpint"),
        ({"publisher": "kafka"}, "kafka"),
        ({"endpoint": "tcp://*:5557"}, "can read the tokens"),
        ({}, "can read the tokens"),
        ({"endpoint": "tcp://10.0.0.1:5557", "bind": True}, "can read the tokens"),
        ({"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://*:6000"}, "can read the tokens"),
        ({"endpoint": "http://127.0.0.1:5557"}, "tcp://HOST:PORT"),
        ({"endpoint": "tcp://127.0.0.1"}, "tcp://HOST:PORT"),
        ({"endpoint": "tcp://127.0.0.1:0"}, "tcp://HOST:PORT"),
        ({"endpoint": "tcp://127.0.0.1:65535"}, "no ports"),
        ({"endpoint": "ipc:///tmp/x"}, "one data-parallel rank"),
        ({"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}, "but overlap"),
        ({"endpoint": "tcp://127.0.0.1:5557", "buffer_steps": 0}, "at least 1"),
        ({"endpoint": "tcp://127.0.0.1:5557", "hwm": "many"}, "hwm"),
    ],
)
def test_a_config_that_cannot_work_is_refused_at_start(config: object, message: str) -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(StartupError, match=message) as error:
        check_settings(
            ServerArgs(model_path="m", dp_size=2, enable_dp_attention=True, tp_size=2, kv_events_config=text)
        )
    assert str(error.value).startswith("--kv-events-config") and "\n" not in str(error.value)


def test_accepted_event_configs_give_their_settings() -> None:
    assert ServerArgs(kv_events_config=json.dumps({"publisher": "null", "endpoint": "tcp://*:1"})).kv_events is None
    assert ServerArgs(kv_events_config='{"enable_kv_cache_events": false}').kv_events is None
    assert ServerArgs().kv_events is None and ServerArgs(kv_events_config="").kv_events is None
    wide = ServerArgs(kv_events_config="{}", allow_unauthenticated=True, dp_size=2).kv_events
    assert wide is not None and wide.is_bound and wide.endpoint_of(1) == "tcp://*:5558"
    assert wide.description(2) == {
        "publisher": "zmq", "topic": "", "block_size": 1, "endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 2
    }  # fmt: skip
    near = ServerArgs(kv_events_config='{"endpoint": "tcp://10.1.1.1:7000"}').kv_events
    assert near is not None and not near.is_bound, "it goes to a named peer"
    with pytest.raises(StartupError, match="--disable-radix-cache"):
        check_settings(
            ServerArgs(
                model_path="m", disable_radix_cache=True, kv_events_config='{"endpoint": "tcp://127.0.0.1:7000"}'
            )
        )


def test_a_port_that_is_taken_is_one_line_at_start(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        config = parse_kv_events(json.dumps({"endpoint": f"tcp://127.0.0.1:{port}", "bind": True}), 1, False)
        assert config is not None
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}: Address already in use"):
            KVEvents(config, 0, lambda: ("v", 0))
