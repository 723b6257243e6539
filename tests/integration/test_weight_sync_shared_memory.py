"""A real `WeightSender` and engine processes on its machine: buckets in memory that both map, and what falls back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.logical_weights_fake import NORM, fused, version
from tests.weight_engine_process import Engine, NearEngine, Refused
from tests.weight_group_helpers import TIMEOUT_S, announce, broadcast, content_of, join, names, seeds
from weight_sync.bucket import pack
from weight_sync.errors import WeightRequestError
from weight_sync.receivers.memory import notice_of
from weight_sync.sealed_memory import MAX_MAPPED, SealedMemory
from weight_sync.sender import EngineError, WeightSender
from weight_sync.sender.carriers import IN_MEMORY


@pytest.fixture(scope="module")
def one_engine() -> Iterator[NearEngine]:
    engine = NearEngine(TIMEOUT_S)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def other() -> Iterator[NearEngine]:
    engine = NearEngine(TIMEOUT_S)
    yield engine
    engine.close()


@pytest.fixture
def engine(one_engine: NearEngine) -> Iterator[NearEngine]:
    yield one_engine
    one_engine.settle()


@pytest.fixture
def sender(engine: NearEngine) -> Iterator[WeightSender]:
    sender = WeightSender(engine, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    yield sender
    sender.close()


class Elsewhere:
    """An engine behind a control that changes the address of memory, or the answer."""

    def __init__(self, engine: Engine, change: dict[str, int] | None = None, answer: dict[str, str] | None = None):
        self._engine, self._change, self._answer = engine, change, answer

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._engine, verb)

    def init_weights_update_group(self, *, memory: dict[str, int] | None = None, **arguments: Any) -> Any:
        memory = None if memory is None else memory | (self._change or {})
        answer = self._engine.init_weights_update_group(memory=memory, **arguments)  # type: ignore[call-arg]
        return answer if self._answer is None else self._answer


OTHER_CONTAINER = {"process": 2**31 - 1}
OTHER_FILE = {"inode": 1}


def mapped_by(process: int) -> int:
    """Return how many mappings of senders' memory a process has."""
    return len(_mappings(process))


def _mappings(process: int | str) -> set[str]:
    return {line for line in Path(f"/proc/{process}/maps").read_text().splitlines() if "lockstep_weights" in line}


def _open_files() -> set[str]:
    """Return the files of senders' memory that this process has open, by their descriptors."""
    files = ((link.name, os.path.realpath(link)) for link in Path("/proc/self/fd").iterdir())
    return {f"{descriptor} {file}" for descriptor, file in files if "lockstep_weights" in file}


class Here:
    """The memory of senders that came since this was made.  Senders of earlier tests may not be collected yet."""

    def __init__(self) -> None:
        self._mapped, self._open = _mappings("self"), _open_files()

    def mapped(self) -> int:
        return len(_mappings("self") - self._mapped)

    def open(self) -> int:
        return len(_open_files() - self._open)


@pytest.fixture
def here() -> Here:
    return Here()


def refresh(sender: WeightSender, **options: Any) -> Any:
    seed = next(seeds)
    return content_of(seed), sender.refresh(version(seed).items(), f"v{seed}", **options)


@pytest.mark.parametrize("bucket_bytes", [1, 60, 1 << 20])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_refresh_sends_every_tensor(
    engine: NearEngine, sender: WeightSender, bucket_bytes: int, with_manifest: bool
) -> None:
    for _ in range(2):
        expected, report = refresh(sender, bucket_bytes=bucket_bytes, with_manifest=with_manifest)
        assert engine.call("content") == expected
        assert report.engines["engine"].transport == IN_MEMORY
        assert report.num_buckets == {1: 11, 60: 5, 1 << 20: 1}[bucket_bytes]
        assert with_manifest is (report.digest == engine.call("content_digest"))


def test_fused_experts_that_lie_end_to_end_are_sent_from_memory_too(engine: NearEngine, sender: WeightSender) -> None:
    seed = next(seeds)
    sender.refresh(fused(version(seed)), f"v{seed}")
    assert engine.call("content") == content_of(seed)


def test_an_update_of_the_caller_s_buckets_is_sent(engine: NearEngine, sender: WeightSender) -> None:
    seed = next(seeds)
    with sender.update(f"v{seed}") as update:
        for named in version(seed).items():
            update.send([named])
            named[1].fill_(0)  # a copy was sent
    assert engine.call("content") == content_of(seed)
    assert update.engines["engine"].transport == IN_MEMORY


def test_memory_is_mapped_once_and_nothing_is_left_of_it(engine: NearEngine, here: Here) -> None:
    """The engine keeps the sender's two areas while they are used; a larger bucket takes a new one in their place."""
    process = engine._process.pid
    sender = WeightSender(engine, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    for bucket_bytes in (60, 60, 1 << 20, 60):
        refresh(sender, bucket_bytes=bucket_bytes)
        assert 1 <= mapped_by(process) <= MAX_MAPPED
    assert 1 <= here.mapped() <= MAX_MAPPED
    assert here.open() >= 1
    sender.close()
    assert mapped_by(process) == here.mapped() == here.open() == 0


@pytest.mark.parametrize(
    ("control", "why"),
    [
        ({"change": OTHER_CONTAINER}, "cannot be opened from here"),
        ({"change": OTHER_FILE}, "another file"),
        ({"answer": {}}, "does not say that it can"),
        ({"answer": {"memory_token": "0" * 64}}, "does not say that it can"),
        (None, "no field for it"),
    ],
)
def test_an_engine_elsewhere_gets_broadcasts(
    engine: NearEngine, here: Here, control: dict[str, Any] | None, why: str
) -> None:
    reached: Any = Forwarded(engine) if control is None else Elsewhere(engine, **control)
    sender = WeightSender(reached, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    expected, report = refresh(sender)
    assert engine.call("content") == expected
    transport = report.engines["engine"].transport
    assert transport.startswith("broadcast (") and why in transport
    assert mapped_by(engine._process.pid) == here.mapped() == 0
    sender.close()


class Forwarded:
    """A control whose calls take any field, such as one of another engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, verb: str) -> Any:
        return lambda **arguments: getattr(self._engine, verb)(**arguments)


def test_a_wrong_sender_that_believes_any_engine_is_noticed(
    engine: NearEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token decides: an engine that reads nothing here would get notices of memory that it cannot open."""
    monkeypatch.setattr("weight_sync.sender.carriers.MemoryOffer.refused", lambda self, call: None)
    sender = WeightSender(Elsewhere(engine, OTHER_CONTAINER), timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    before = engine.call("content")
    bucket = engine.update_weights_from_distributed

    def elsewhere(*, memory: dict[str, int], **arguments: Any) -> Any:
        return bucket(memory=memory | OTHER_CONTAINER, **arguments)

    monkeypatch.setattr(engine, "update_weights_from_distributed", elsewhere)
    with pytest.raises(EngineError, match="cannot be opened from here"):
        refresh(sender)
    assert engine.call("content") == before
    sender.close()


def test_what_is_asked_for_by_name_is_used(engine: NearEngine) -> None:
    sender = WeightSender(engine, timeout_s=TIMEOUT_S, transport="broadcast")
    sender.connect(group_name=next(names))
    expected, report = refresh(sender)
    assert engine.call("content") == expected
    assert report.engines["engine"].transport == "broadcast (it was asked for)"
    sender.close()
    group = next(names)
    sender = WeightSender(Elsewhere(engine, OTHER_CONTAINER), timeout_s=TIMEOUT_S, transport="shared_memory")
    with pytest.raises(EngineError, match=r"cannot read this process's memory: .*use another transport"):
        sender.connect(group_name=group)
    assert sender.connected == []
    with pytest.raises(Refused, match=r"404"):
        engine.destroy_weights_update_group(group_name=group)


def test_an_engine_cannot_join_over_another_backend_than_the_ones_before(
    engine: NearEngine, other: NearEngine, sender: WeightSender
) -> None:
    """The tensors are on one device; memory of a GPU is not mapped."""
    sender.add_engine("other", other)
    with pytest.raises(WeightRequestError, match="connected over gloo, not nccl"):
        sender.connect(group_name=next(names), device="cuda")
    assert sender.connected == ["engine"]
    sender.remove_engine("other")
    expected, _ = refresh(sender)
    assert engine.call("content") == expected


@pytest.mark.parametrize("shared", [False, True])
def test_engines_here_and_elsewhere_have_the_same_content(engine: NearEngine, other: NearEngine, shared: bool) -> None:
    """Each has its own link; in one group of all they read memory only if every one can."""
    sender = WeightSender({"here": engine, "there": Elsewhere(other, OTHER_CONTAINER)}, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names), shared=shared)
    expected, report = refresh(sender, bucket_bytes=60)
    assert engine.call("content") == other.call("content") == expected
    assert (report.engines["here"].transport == IN_MEMORY) is not shared
    assert report.engines["there"].transport.startswith("broadcast (")
    sender.close()


def test_two_engines_read_one_memory(engine: NearEngine, other: NearEngine, here: Here) -> None:
    for shared in (False, True):
        sender = WeightSender({"a": engine, "b": other}, timeout_s=TIMEOUT_S)
        sender.connect(group_name=next(names), shared=shared)
        for _ in range(2):
            expected, report = refresh(sender, bucket_bytes=60)
            assert engine.call("content") == other.call("content") == expected
            assert {report.engines[name].transport for name in "ab"} == {IN_MEMORY}
        assert 1 <= here.mapped() <= MAX_MAPPED
        sender.close()


def test_a_refused_refresh_changes_nothing_and_the_next_one_is_taken(engine: NearEngine, sender: WeightSender) -> None:
    before = engine.call("content")
    wrong = version(next(seeds))
    wrong[NORM][0] = float("nan")
    with pytest.raises(EngineError, match=NORM):
        sender.refresh(wrong.items(), "wrong", with_manifest=False, bucket_bytes=60)
    assert engine.call("content") == before
    if not sender.connected:
        sender.connect(group_name=next(names))
    expected, _ = refresh(sender, bucket_bytes=60)
    assert engine.call("content") == expected
    engine.call("collect")
    assert mapped_by(engine._process.pid) <= MAX_MAPPED


class Restarted:
    """A control whose engine is replaced by another process, as a restart does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.engine, verb)

    def init_weights_update_group(self, *, memory: dict[str, int] | None = None, **arguments: Any) -> Any:
        return self.engine.init_weights_update_group(memory=memory, **arguments)  # type: ignore[call-arg]


@pytest.mark.parametrize("own_buckets", [True, False])
def test_an_engine_that_was_restarted_takes_part_again_after_connect(
    engine: NearEngine, other: NearEngine, own_buckets: bool
) -> None:
    """Its first bucket was packed whole before the call: no notice of it fails, only the call."""
    control = Restarted(engine)
    sender = WeightSender(control, timeout_s=TIMEOUT_S)
    sender.connect(group_name=next(names))
    control.engine = other
    before = other.call("content")
    with pytest.raises(EngineError, match=r"404.*does not exist"):
        if own_buckets:
            with sender.update("lost") as update:
                update.send(version(next(seeds)).items())
        else:
            refresh(sender, bucket_bytes=60)
    assert sender.connected == [] and other.call("content") == before
    sender.connect(group_name=next(names))
    expected, report = refresh(sender, bucket_bytes=60)
    assert other.call("content") == expected
    assert report.engines["engine"].transport == IN_MEMORY
    sender.close()


def test_a_filled_bucket_that_cannot_be_read_costs_no_group(
    engine: NearEngine, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it can be on its way, also where the engine does not know its tensors."""
    bucket = engine.update_weights_from_distributed

    def misread(*, dtypes: list[str], **arguments: Any) -> Any:
        return bucket(dtypes=["float99"] * len(dtypes), **arguments)

    with monkeypatch.context() as patch, pytest.raises(EngineError, match="float99"):
        patch.setattr(engine, "update_weights_from_distributed", misread)
        with sender.update("misread") as update:
            update.send(version(next(seeds)).items())
    seed = next(seeds)
    with sender.update(f"v{seed}") as update:
        update.send(version(seed).items())
    assert engine.call("content") == content_of(seed)


# --- senders that are wrong ---------------------------------------------------------------------------------------


def _in_memory(named: list[tuple[str, torch.Tensor]]) -> SealedMemory:
    content = pack(named)
    memory = SealedMemory(content.numel())
    memory.content.copy_(content)
    return memory


@pytest.mark.parametrize("kind", ["another start", "another size", "other memory", "content"])
def test_a_notice_of_something_else_is_refused(engine: NearEngine, kind: str) -> None:
    group, named = join(engine), list(version(next(seeds)).items())
    memory, before = _in_memory(named), engine.call("content")
    engine.begin_weight_update(update_id=group.name)
    fields = {"load_format": "pieces", "memory": memory.address._asdict(), "update_id": group.name}
    answer = announce(engine, group, named, **fields)
    total = memory.content.numel()
    notices = {
        "another start": notice_of(memory.address, 8, total),
        "another size": notice_of(memory.address, 0, total + 8),
        "other memory": notice_of(_in_memory(named).address, 0, total),
        "content": memory.content,
    }
    broadcast(group, notices[kind])
    refused = answer(TIMEOUT_S)
    assert isinstance(refused, Refused) and refused.kind == "ContentError", refused
    assert engine.call("content") == before
    group.destroy()


@pytest.mark.parametrize(
    "wrong", [{"num_bytes": 1 << 40}, {"num_bytes": 8}, {"inode": 1}, {"descriptor": 2**31 - 1}, {"filled": 8}]
)
def test_an_address_that_does_not_fit_is_refused_and_the_group_is_left(
    engine: NearEngine, wrong: dict[str, int]
) -> None:
    group, named = join(engine), list(version(next(seeds)).items())
    memory, before = _in_memory(named), engine.call("content")
    engine.begin_weight_update(update_id=group.name)
    address = memory.address._asdict() | wrong
    refused = announce(engine, group, named, load_format="pieces", memory=address, update_id=group.name)(TIMEOUT_S)
    assert isinstance(refused, Refused) and refused.kind == "WeightRequestError", refused
    assert engine.call("content") == before
    with pytest.raises(Refused, match=r"404"):
        engine.destroy_weights_update_group(group_name=group.name)
    group.destroy()


def test_a_bucket_that_is_there_needs_no_notice_and_no_group_is_left_when_it_is_refused(
    engine: NearEngine,
) -> None:
    seed = next(seeds)
    group, named = join(engine), list(version(seed).items())
    memory = _in_memory(named)
    whole = memory.address._asdict() | {"filled": memory.content.numel()}
    fields = {"load_format": "pieces", "memory": whole, "update_id": group.name}
    engine.begin_weight_update(update_id=group.name)
    for refused in (True, False):
        if refused:
            wrong = announce(engine, group, named, **fields | {"update_id": "another"})(TIMEOUT_S)
            assert isinstance(wrong, Refused) and wrong.kind == "TransactionStateError"
        else:
            assert announce(engine, group, named, **fields)(TIMEOUT_S) is None
    engine.end_weight_update(update_id=group.name)
    assert engine.call("content") == content_of(seed)
    engine.destroy_weights_update_group(group_name=group.name)
    group.destroy()


def test_a_sender_that_goes_before_its_notice_leaves_the_old_weights(engine: NearEngine) -> None:
    """Half of the piece is written by then: the engine has not read it."""
    group, named = join(engine), list(version(next(seeds)).items())
    memory, before = _in_memory(named), engine.call("content")
    engine.begin_weight_update(update_id=group.name)
    fields = {"load_format": "pieces", "memory": memory.address._asdict(), "update_id": group.name}
    answer = announce(engine, group, named, **fields)
    group.broken = True
    group.destroy()
    refused = answer(TIMEOUT_S)
    assert isinstance(refused, Refused) and refused.kind == "TransportError", refused
    assert engine.call("content") == before
    engine.call("collect")
    assert mapped_by(engine._process.pid) == 0
