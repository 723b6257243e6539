"""Refusals by an updater of one rank: tensors in memory, folders, deltas, conversations of checkpoint-engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from tests.delta_models import delta_source, nudged
from tests.ipc_wire import entry
from tests.logical_weights_fake import DOWN, EMBED, LM_HEAD, NORM, FakeWeights, expert_name, fused, version
from tests.loopback_updater import LoopbackSource
from tests.parameter_server_stand_in import Form, ParameterServerStandIn, Sending, give_up_at
from tests.published_versions import write_checkpoint
from tests.refusals.row import Fault, Row, Start
from tests.refusals.targets import (
    Refusal,
    Tensors,
    UpdaterTarget,
    without,
)
from weight_sync import shadow
from weight_sync.delta.durable import locked
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.local_state import LOCK_FILE, SYNC_FOLDER, LocalState, LocalVersion, write_state
from weight_sync.errors import (
    BaseMismatchError,
    CommitError,
    ContentError,
    CoverageError,
    DtypeMismatchError,
    ShapeMismatchError,
    StagingError,
    TransactionStateError,
    TransportError,
    UnknownTensorError,
    WeightRequestError,
    WeightSyncError,
)
from weight_sync.fingerprint import fingerprint
from weight_sync.known_calls import KnownCalls
from weight_sync.manifest import Entries
from weight_sync.receivers.base import BucketSource, KnownCall
from weight_sync.receivers.disk import DiskSource
from weight_sync.receivers.ipc import IpcSource
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import StagingMode
from weight_sync.take_spans import SpanTables
from weight_sync.tensor_meta import TensorMeta
from weight_sync.unnamed_file import UnnamedFile

# --- an updater, and tensors in memory --------------------------------------------------------------------------------


def updater(staging: StagingMode = "host", odd: bool = False, **settings: Any) -> Start:
    """Start with weights of version 1 in memory.  `odd`: one value is NaN, which must come back, too."""

    @contextmanager
    def start(scratch: Path) -> Iterator[UpdaterTarget]:
        weights = FakeWeights(seed=1)
        if odd:
            weights.embed[0, 0] = float("nan")
        yield UpdaterTarget(weights, version(3), staging, **settings)

    return start


def two_buckets(named: Sequence[tuple[str, torch.Tensor]]) -> list[BucketSource]:
    return [LoopbackSource(list(named[:4])), LoopbackSource(list(named[4:]))]


def sends(change: Callable[[Tensors], Any] = dict, **begin: Any) -> Fault:
    """Send the tensors of version 2 in two buckets, after a change."""
    return lambda target, _: target.attempt(two_buckets(list(change(version(2)).items())), **begin)


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


def with_last(name: str, value: float) -> Callable[[Tensors], Tensors]:
    """Return a change that gives the last element of a tensor this value."""

    def change(tensors: Tensors) -> Tensors:
        changed = tensors[name].clone()
        changed.view(-1)[-1] = value
        return {**tensors, name: changed}

    return change


def manifest_of(tensors: Tensors) -> Entries:
    return [(TensorMeta(n, t.dtype, tuple(t.shape)), fingerprint(t)) for n, t in tensors.items()]


def one_bit_off(tensors: Tensors) -> Tensors:
    changed = tensors[LAST].clone()
    changed.view(torch.int16)[0, 0] ^= 1
    return {**tensors, LAST: changed}


def repeated(target: UpdaterTarget, _: Path) -> Refusal:
    named = list(version(2).items())
    return target.attempt([LoopbackSource(named[:4]), LoopbackSource([*named[4:], named[0]])])


def votes(*answers: bool | Exception) -> Fault:
    """Make another rank vote like this after all tensors came."""

    def fault(target: UpdaterTarget, _: Path) -> Refusal:
        target.votes[:] = answers
        return target.attempt(two_buckets(list(version(2).items())))

    return fault


def exchange_fails(at: int) -> Fault:
    """Raise in the exchange of one of four storages, or in the derived tensor, which comes after them.

    Each storage is exchanged by a call of its own.
    """

    def fault(target: UpdaterTarget, _: Path) -> Refusal:
        exchange, calls, derived = ShadowStaging.exchange, iter(range(1000)), iter([at == 4])

        def faulty(live: Sequence[torch.Tensor], aside: Sequence[torch.Tensor]) -> None:
            if next(calls) == at:
                raise RuntimeError("device lost")
            exchange(live, aside)

        def derived_fault() -> None:
            if next(derived, False):
                raise RuntimeError("device lost")

        target.weights.derived_fault = derived_fault
        failing = mock.patch.object(ShadowStaging, "exchange", staticmethod(faulty)) if at < 4 else nullcontext()
        with failing, mock.patch.object(shadow, "_TOGETHER_BYTES", 0):
            refusal = target.attempt(two_buckets(list(version(2).items())))
        assert target.voted == [True, False], "other ranks are told"
        return refusal

    return fault


def write_fails(at: int) -> Fault:
    """Raise before one of the writes into the model, with all before it done.

    Tensors that plans leave out are written one by one.
    """

    def fault(target: UpdaterTarget, _: Path) -> Refusal:
        numbers = iter(range(1000))

        def stop(name: str) -> None:
            if next(numbers) == at:
                raise OSError("no such luck")

        def take(
            tables: SpanTables, *arguments: Any, checks: bool = True, writes: bool = True, live: Any = None
        ) -> Any:
            if writes and not checks:
                for done in range(len(tables.moves)):
                    if next(numbers) == at:
                        inner(SpanTables(tables.tensors, tables.moves[:done]), *arguments, checks=False)
                        raise OSError("no such luck")
            return inner(tables, *arguments, checks=checks, writes=writes, live=live)

        inner, target.weights.fault = SpanTables.take, stop
        with mock.patch.object(SpanTables, "take", take):
            refusal = target.attempt(two_buckets(list(version(2).items())))
        target.weights.fault = lambda name: None
        return refusal

    return fault


def transfer_fails(failure: Exception, **begin: Any) -> Fault:
    """Fail the transfer of the second of three buckets."""

    def fault(target: UpdaterTarget, _: Path) -> Refusal:
        named = list(version(2).items())
        buckets = [LoopbackSource(named[:3]), LoopbackSource(named[3:6], failure), LoopbackSource(named[6:])]
        return target.attempt(buckets, **begin)

    return fault


def lease_runs_out(target: UpdaterTarget, _: Path) -> Refusal:
    def buckets() -> Iterator[BucketSource]:
        first, second = two_buckets(list(version(2).items()))
        yield first
        target.now += 10_000
        target.updater.expire()
        yield second

    return target.attempt(buckets())


def disk_is_full(target: UpdaterTarget, _: Path) -> Refusal:
    """Fill the disk, so that the journal takes its first tensor and no byte more."""
    append, calls = UnnamedFile.append, iter(range(1000))

    def full(file: UnnamedFile, content: Any) -> Any:
        if next(calls):
            raise OSError(28, "No space left on device")
        return append(file, content)

    with mock.patch.object(UnnamedFile, "append", full):
        return target.attempt(two_buckets(list(version(2).items())))


def no_file(target: UpdaterTarget, _: Path) -> Refusal:
    """Fill the disk, so that the journal's folder takes no file."""
    with mock.patch("tempfile.TemporaryFile", side_effect=OSError(28, "No space left on device")):
        return target.attempt(two_buckets(list(version(2).items())))


LAST = expert_name(2, "down_proj")
NOT_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
OF_2 = manifest_of(version(2))


def manifest_rows() -> Iterator[Row]:
    bfloat16 = torch.bfloat16
    wrong: dict[str, tuple[Any, type[Exception], str]] = {
        "unknown": ([*OF_2, (TensorMeta("ghost", torch.float32, (1,)), None)], UnknownTensorError, "ghost"),
        "lacks": (OF_2[1:], CoverageError, f"manifest lacks 1 tensors: {EMBED}"),
        "twice": ([*OF_2, OF_2[2]], CoverageError, "twice"),
        "empty": ([], CoverageError, "lacks 11 tensors"),
        "shape": ([(TensorMeta(EMBED, bfloat16, (4, 6)), None), *OF_2[1:]], ShapeMismatchError, "embed"),
        "dtype": ([(TensorMeta(EMBED, torch.float16, (6, 4)), None), *OF_2[1:]], DtypeMismatchError, "got float16"),
        "tied": ([*OF_2, (TensorMeta(LM_HEAD, bfloat16, (6, 4)), 1)], WeightRequestError, "two fingerprints"),
        "fused": ([*OF_2, (TensorMeta(DOWN, bfloat16, (3, 4, 2)), 1)], WeightRequestError, "the model splits "),
    }
    for name, (manifest, kind, reason) in wrong.items():
        yield Row(f"updater-memory-manifest {name}", updater(), sends(manifest=manifest), kind, reason)
    empty = sends(manifest=[], coverage="partial")
    yield Row("updater-memory-manifest empty, partial", updater(), empty, CoverageError, "empty")


def memory_rows() -> Iterator[Row]:
    for tensor in (NORM, EMBED, LAST):
        for name, value in NOT_FINITE.items():
            title = f"updater-memory-{name} in {tensor}-host"
            yield Row(title, updater(), sends(with_last(tensor, value)), ContentError, f"not finite in {tensor}$")
    stated = f"{LAST}: fingerprint [0-9a-f]{{16}}, the manifest expects"
    yield Row("updater-memory-one bit off-host", updater(), sends(one_bit_off, manifest=OF_2), ContentError, stated)
    for staging in ("host", "device", "journal"):
        start = updater(staging, odd=True)  # type: ignore[arg-type]
        missing = f"1 of 11 tensors missing: {NORM}"
        ghost = sends(with_tensor("ghost", torch.zeros(1)))
        yield Row(f"updater-memory-unknown-{staging}", start, ghost, UnknownTensorError, "ghost")
        shape = sends(with_tensor(NORM, torch.zeros(5)))
        yield Row(f"updater-memory-shape-{staging}", start, shape, ShapeMismatchError, NORM)
        dtype = sends(with_tensor(NORM, torch.zeros(4, dtype=torch.float64)))
        yield Row(f"updater-memory-dtype-{staging}", start, dtype, DtypeMismatchError, NORM)
        yield Row(f"updater-memory-again-{staging}", start, repeated, CoverageError, "came twice")
        yield Row(f"updater-memory-missing-{staging}", start, sends(without(NORM)), CoverageError, missing)
        yield Row(f"updater-memory-lease runs out-{staging}", start, lease_runs_out, TransactionStateError, "lease of")
        no = votes(False)
        yield Row(f"updater-memory-another rank refuses-{staging}", start, no, TransactionStateError, "another rank")
        lost = votes(True, False)
        restored = "another rank, or another target of the update, did not commit; the old weights were restored"
        yield Row(f"updater-memory-another rank cannot write-{staging}", start, lost, CommitError, restored)
        late = votes(TimeoutError("no vote in time"))
        yield Row(f"updater-memory-another rank is late-{staging}", start, late, TimeoutError, "no vote in time")
    for failure in (TransportError("the sender is gone"), OSError("broken pipe")):
        lost, kind, reason = transfer_fails(failure), type(failure), str(failure)
        yield Row(f"updater-memory-56 trl 6913, {reason}-host", updater(), lost, kind, reason)
    chunk = transfer_fails(TransportError("the sender is gone"), coverage="partial")
    yield Row("updater-memory-52 tokenspeed 672-host", updater(), chunk, TransportError, "the sender is gone")
    lost_device = "device lost; the old weights were restored"
    for at in range(5):
        name = f"updater-memory-exchange {at} fails-host"
        yield Row(name, updater(odd=True), exchange_fails(at), CommitError, lost_device)
    for at in range(11):
        name = f"updater-memory-53 unirl 480, write {at} stops-journal"
        yield Row(name, updater("journal", odd=True), write_fails(at), OSError, "no such luck")
    full = "cannot be written to the journal: .*No space left.*the old weights were restored"
    yield Row("updater-memory-the disk is full-journal", updater("journal"), disk_is_full, StagingError, full)
    yield Row(
        "updater-memory-no journal-journal",
        updater("journal"),
        no_file,
        StagingError,
        "the journal in .* cannot be created: .*No space left",
    )
    in_place, nan = updater("in_place"), sends(with_last(expert_name(0, "up_proj"), float("nan")))
    yield Row("updater-memory-nan before a write-in_place", in_place, nan, ContentError, "not finite")


# --- folders ----------------------------------------------------------------------------------------------------------


def folder_of(scratch: Path, tensors: Tensors) -> Path:
    return write_checkpoint(scratch / "new", tensors, (tuple(tensors),))


def disk(target: UpdaterTarget, folder: Path) -> DiskSource:
    calls = target.updater.receiver.known_calls
    return DiskSource(folder, target.weights, complete=True, timeout_s=0.2, known_calls=calls)


def damaged(damage: Callable[[Path], object]) -> Fault:
    def fault(target: UpdaterTarget, scratch: Path) -> Refusal:
        folder = folder_of(scratch, version(2))
        damage(folder / "model.safetensors")
        return target.attempt([disk(target, folder)])

    return fault


def dropping(name: str) -> Callable[[Path], None]:
    return lambda path: save_file(without(name)(load_file(path)), path)


def putting(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda path: save_file(load_file(path) | {name: tensor}, path)


def renaming(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"model.norm.weight":{', b'"model.norm.weighT":{', 1))


def huge_header(path: Path) -> None:
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def shrinks(target: UpdaterTarget, scratch: Path) -> Refusal:
    """Cut the file after its first tensors were read: the read must raise an error, not end in a signal."""
    folder = folder_of(scratch, version(2))
    unknown: KnownCalls[KnownCall] = KnownCalls(0)  # so that it is cut into parts here
    source = DiskSource(folder, target.weights, complete=True, timeout_s=0.2, known_calls=unknown)
    receive = source.receive

    def shrinking() -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        buckets = receive()
        yield next(buckets)
        os.truncate(folder / "model.safetensors", 800)
        yield from buckets

    source.receive = shrinking  # type: ignore[method-assign]
    with mock.patch("weight_sync.receivers.disk.PART_BYTES", 60):
        return target.attempt([source])


def between_versions(target: UpdaterTarget, scratch: Path) -> Refusal:
    folder = folder_of(scratch, version(2))
    (folder / SYNC_FOLDER).mkdir()
    (folder / SYNC_FOLDER / LOCK_FILE).touch()
    local = LocalVersion(1, ("model.safetensors",))
    write_state(folder, LocalState(local, LocalVersion(2, local.files), local.files))
    return target.attempt([disk(target, folder)])


def being_pulled(target: UpdaterTarget, scratch: Path) -> Refusal:
    folder = folder_of(scratch, version(2))
    (folder / SYNC_FOLDER).mkdir()
    write_state(folder, LocalState(LocalVersion(1, ("model.safetensors",))))
    with locked(folder / SYNC_FOLDER / LOCK_FILE, shared=False, timeout_s=1.0):
        return target.attempt([disk(target, folder)])


DISK: dict[str, tuple[Fault, type[WeightSyncError], str]] = {
    "missing tensor": (damaged(dropping(NORM)), CoverageError, "missing"),
    "unknown tensor": (damaged(putting("stranger", torch.zeros(2))), UnknownTensorError, "stranger"),
    "wrong shape": (damaged(putting(NORM, torch.zeros(5))), ShapeMismatchError, NORM),
    "wrong kind": (damaged(putting(NORM, torch.zeros(4, dtype=torch.int32))), DtypeMismatchError, NORM),
    "not finite": (damaged(putting(NORM, torch.tensor([0.0, 1.0, torch.nan, 2.0]))), ContentError, "not finite"),
    "renamed": (damaged(renaming), UnknownTensorError, "weighT"),
    "truncated": (
        damaged(lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ContentError,
        "1327 bytes, but its header describes 1328",
    ),
    "header cut": (damaged(lambda path: path.write_bytes(path.read_bytes()[:30])), ContentError, "cut short"),
    "header absurd": (damaged(huge_header), ContentError, "cut short"),
    "empty": (damaged(lambda path: path.write_bytes(b"")), ContentError, "not a safetensors file"),
    "gone": (damaged(lambda path: path.unlink()), WeightRequestError, "no .*safetensors"),
    "a pipe": (damaged(pipe), WeightRequestError, "is not a file"),
    "shrinks while it is read": (shrinks, ContentError, "ends at byte"),
    "between two versions": (between_versions, TransactionStateError, "between two versions"),
    "being pulled": (being_pulled, TransactionStateError, "locked by another process"),
}


# --- deltas -----------------------------------------------------------------------------------------------------------


def delta(base: Callable[[Tensors], Tensors] = dict, new: Callable[[Tensors], Tensors] = nudged) -> Fault:
    """Send a delta that starts from `base` of the version in force, and leads to `new` of that base."""

    def fault(target: UpdaterTarget, _: Path) -> Refusal:
        old = base(version(1))
        (payload,) = DeltaEncoder(old.items()).encode(new(old).items()).payloads()
        return target.attempt([delta_source(payload, target.weights)])

    return fault


def last_one_higher(tensors: Tensors) -> Tensors:
    return {**tensors, LAST: tensors[LAST] + 1}


def infinite_norm(tensors: Tensors) -> Tensors:
    norm = tensors[NORM].clone()
    norm[0] = torch.inf
    return {**tensors, NORM: norm}


def norm_in_bfloat16(tensors: Tensors) -> Tensors:
    return {**tensors, NORM: tensors[NORM].to(torch.bfloat16)}


DELTA: dict[str, tuple[Fault, type[WeightSyncError], str]] = {
    "unknown": (delta(with_tensor("stranger", torch.zeros(3))), UnknownTensorError, "stranger"),
    "shape": (delta(with_tensor(NORM, torch.zeros(9))), ShapeMismatchError, NORM),
    "dtype": (delta(norm_in_bfloat16), DtypeMismatchError, NORM),
    "fused": (delta(fused), WeightRequestError, "must use the model's own tensors and names"),
    "missing": (delta(without(NORM)), CoverageError, "missing"),
    "not finite": (delta(new=infinite_norm), ContentError, "not finite"),
    "another base": (delta(nudged), BaseMismatchError, "starts from fingerprint"),
    "another base of the last": (delta(last_one_higher), BaseMismatchError, LAST),
}


# --- checkpoint-engine's conversation ---------------------------------------------------------------------------------


def conversation(form: Form, message: Any) -> Fault:
    """Announce one bucket by this message; the sender must get the reason of the refusal."""

    def fault(target: UpdaterTarget, _: Path) -> Refusal:
        named = list(without(NORM)(version(2)).items())
        with ParameterServerStandIn(form=form) as server:
            server.rewrite = lambda index, right: message if index == 1 else right
            with Sending(lambda: server.update(named)):
                refusal = target.attempt([IpcSource(server.handles, target.updater.receiver)])
            assert refusal.message in server.answers
        return refusal

    return fault


def sender_gives_up(after: int) -> Fault:
    def fault(target: UpdaterTarget, _: Path) -> Refusal:
        with ParameterServerStandIn(bucket_bytes=256) as server:
            give_up_at(server, after)
            with Sending(lambda: server.update(list(version(2).items()))):
                return target.attempt([IpcSource(server.handles, target.updater.receiver)])

    return fault


CONVERSATIONS: list[tuple[str, Any, type[Exception], str]] = [
    ("ends beyond", [entry(offset=2048 - 12)], WeightRequestError, "reaches byte"),
    ("begins beyond", [entry(offset=4096)], WeightRequestError, "offset 4096 is outside a buffer of 2048 bytes"),
    ("begins before", [entry(offset=-4)], WeightRequestError, "offset -4 is outside a buffer of 2048 bytes"),
    ("not aligned", [entry(offset=2)], WeightRequestError, "cannot be read from offset 2"),
    ("no offset", [entry(offset=None)], WeightRequestError, "offset None"),
    ("offset true", [entry(offset=True)], WeightRequestError, "offset True"),
    ("huge", [entry(shape=[1 << 40])], WeightRequestError, "reaches byte"),
    ("overflow", [entry(shape=[1 << 60, 1 << 60])], WeightRequestError, "out of range"),
    ("negative size", [entry(shape=[-4])], WeightRequestError, "out of range"),
    ("nine sizes", [entry(shape=[1] * 9)], WeightRequestError, "sizes"),
    ("shape as text", [entry(shape="4")], WeightRequestError, "no dtype or no shape"),
    ("unknown dtype", [entry(dtype="float31")], WeightRequestError, "unknown dtype"),
    ("no dtype", [entry(dtype=None)], WeightRequestError, "no dtype or no shape"),
    ("empty name", [entry(name="")], WeightRequestError, "name"),
    ("no name", [entry(name=None)], WeightRequestError, "name"),
    (
        "overlap",
        [entry(), entry(name=EMBED, dtype=torch.bfloat16, shape=[6, 4], offset=12)],
        WeightRequestError,
        "overlap",
    ),
    ("name alone", [{"name": NORM}], WeightRequestError, "lacks dtype, shape, offset"),
    ("text", [NORM], WeightRequestError, "lacks name"),
    ("no list", {"name": NORM}, WeightRequestError, "not a bucket, the end or an exception"),
    ("unknown", [entry(name="model.norm.bias")], UnknownTensorError, "model.norm.bias"),
    ("shape", [entry(shape=[2])], ShapeMismatchError, NORM),
    ("dtype", [entry(dtype=torch.float64)], DtypeMismatchError, NORM),
    ("twice", [entry(), entry(offset=256)], CoverageError, "came twice"),
]


def source_rows() -> Iterator[Row]:
    for name, (fault, kind, reason) in DISK.items():
        yield Row(f"updater-disk-{name}-host", updater(), fault, kind, reason)
    for name, (fault, kind, reason) in DELTA.items():
        yield Row(f"updater-delta-{name}-host", updater(), fault, kind, reason)
    fault, kind, reason = DELTA["another base of the last"]
    yield Row("updater-delta-another base of the last-in_place", updater("in_place"), fault, kind, reason)
    for form in ("pickle", "json"):
        for name, message, kind, reason in CONVERSATIONS:
            fault = conversation(form, message)  # type: ignore[arg-type]
            yield Row(f"updater-ipc {form}-{name}-host", updater(), fault, kind, reason)
    for after in (0, 1, 3):
        name = f"updater-ipc pickle-gives up after {after}-host"
        yield Row(name, updater(), sender_gives_up(after), TransportError, "another worker failed")
