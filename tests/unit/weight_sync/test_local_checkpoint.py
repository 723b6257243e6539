"""`pull` into a local checkpoint: every encoding, every chain, and every wrong file refused with a reason."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import random
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.delta_models import same_bits
from tests.plane_tables import size_table
from tests.published_versions import Stream, read_checkpoint, rewrite_index, write_checkpoint
from weight_sync.checkpoint_folder import INDEX_FILE
from weight_sync.delta import local_checkpoint, published, version_dir
from weight_sync.delta.compression import compress
from weight_sync.delta.durable import locked
from weight_sync.delta.encoder import DeltaEncoder, EncodedDelta
from weight_sync.delta.frame import DeltaFrame
from weight_sync.delta.local_checkpoint import PullResult, pull
from weight_sync.delta.local_state import LOCK_FILE, NEXT_FOLDER, STATE_FILE, SYNC_FOLDER
from weight_sync.delta.publisher import publish_bytes, publish_encoded
from weight_sync.delta.tensor_list import TensorList
from weight_sync.delta.version_dir import version_path
from weight_sync.errors import (
    ContentError,
    LocalCheckpointError,
    ShapeMismatchError,
    TransactionStateError,
    WeightRequestError,
    WeightSyncError,
)
from weight_sync.safetensors_file import read_header
from weight_sync.tensor_meta import TensorMeta

torch.set_num_threads(1)

ENCODINGS = ("xor", "overwrite", "ulp-gap")


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    return Stream(tmp_path)


def pulled(stream: Stream, target: int, timeout_s: float = 5.0) -> PullResult:
    return pull(stream.local, stream.base, stream.source, target, timeout_s=timeout_s)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files in the folder apart from the lock, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK_FILE
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("checksum_format", ["xxh3-128", "blake3", "adler32"])
def test_each_encoding_one_version_after_the_other(stream: Stream, encoding: str, checksum_format: str) -> None:
    assert pulled(stream, 0).previous is None
    assert same_bits(read_checkpoint(stream.local), stream.versions[0])
    for _ in range(3):
        version = stream.publish(encoding, checksum_format)
        result = pulled(stream, version)
        assert (result.start, result.num_deltas) == (version - 1, 1)
        assert same_bits(read_checkpoint(stream.local), stream.versions[version])
    assert (stream.local / "config.json").read_text() == (stream.base / "config.json").read_text()
    assert json.loads((stream.local / SYNC_FOLDER / STATE_FILE).read_text())["version"] == "000003"


def test_a_chain_of_all_encodings_in_one_pull(stream: Stream) -> None:
    pulled(stream, 0)
    for encoding in (*ENCODINGS, *ENCODINGS):
        stream.publish(encoding)
    result = pulled(stream, 6)
    assert (result.previous, result.start, result.num_deltas) == (0, 0, 6)
    assert same_bits(read_checkpoint(stream.local), stream.versions[6])
    assert pulled(stream, 6).written_bytes == 0


def test_a_fresh_folder_starts_from_the_newest_full_version(stream: Stream) -> None:
    for encoding in ("xor", "full", "ulp-gap"):
        stream.publish(encoding)
    shutil.rmtree(version_path(stream.source, 1))  # not needed any more
    result = pulled(stream, 3)
    assert (result.previous, result.start, result.num_deltas) == (None, None, 1)
    assert same_bits(read_checkpoint(stream.local), stream.versions[3])
    assert [path.name for path in stream.local.glob("*.safetensors")] == ["model.safetensors"]


def test_a_full_version_replaces_files_of_other_names(stream: Stream) -> None:
    stream.publish("xor")
    pulled(stream, 1)
    stream.publish("full")
    pulled(stream, 2)
    assert same_bits(read_checkpoint(stream.local), stream.versions[2])
    assert not (stream.local / INDEX_FILE).exists()


def test_an_older_version_is_made_anew(stream: Stream) -> None:
    for encoding in ("xor", "overwrite"):
        stream.publish(encoding)
    pulled(stream, 2)
    for target in (1, 0):
        pulled(stream, target)
        assert same_bits(read_checkpoint(stream.local), stream.versions[target])


def test_a_new_run_under_the_same_numbers_is_noticed(stream: Stream, tmp_path: Path) -> None:
    stream.publish("xor")
    pulled(stream, 1)
    shutil.rmtree(stream.source)
    other = Stream(tmp_path / "other", seed=7)
    other.publish("xor")
    shutil.copytree(other.source, stream.source)
    result = pull(stream.local, other.base, stream.source, 1, timeout_s=5.0)
    assert result.start is None
    assert same_bits(read_checkpoint(stream.local), other.versions[1])


def test_a_checkpoint_that_slime_pulled_goes_on_from_its_state(stream: Stream) -> None:
    """Its state file has the version only."""
    write_checkpoint(stream.local, stream.versions[0])
    (stream.local / SYNC_FOLDER).mkdir()
    (stream.local / SYNC_FOLDER / STATE_FILE).write_text('{"version": "000000"}')
    stream.publish("xor")
    assert pulled(stream, 1).start == 0
    assert same_bits(read_checkpoint(stream.local), stream.versions[1])


def test_a_version_in_which_nothing_changed(stream: Stream) -> None:
    pulled(stream, 0)
    publish_bytes(stream.source, 1, stream.versions[0], stream.versions[0])
    assert pulled(stream, 1).num_patched == 0
    assert same_bits(read_checkpoint(stream.local), stream.versions[0])


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _flip_last(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x10
    path.write_bytes(content)


def _flip_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[20] ^= 0x04
    path.write_bytes(content)


def _file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def _weight_map(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


def _link_out(folder: Path) -> None:
    path, outside = _file(folder), folder.parent.parent / "outside.safetensors"
    shutil.move(path, outside)
    path.symlink_to(outside)


def _rename_tensor(folder: Path) -> None:
    path = _file(folder)
    tensors, sums = load_file(path), read_header(path).metadata
    tensors["stranger"], sums["stranger"] = tensors.pop("norm"), sums.pop("norm")
    save_file(tensors, path, metadata=sums)
    _weight_map(folder, lambda names: names.update(stranger=names.pop("norm")))


def _swap_tensors(folder: Path) -> None:
    """Exchange the payloads of two tensors of one size; checksums stay under their names."""
    path = _file(folder)
    tensors, sums = load_file(path), read_header(path).metadata
    tensors["layer.0"], tensors["layer.1"] = tensors["layer.1"], tensors["layer.0"]
    save_file(tensors, path, metadata=sums)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: _truncate(_file(folder)), "header describes|cut short"),
    "flipped byte": (lambda folder: _flip_last(_file(folder)), "checksum|zstd|fingerprint|lacks"),
    "flipped header": (
        lambda folder: _flip_header(_file(folder)),
        "header|dtype|data_offsets|disagree|lie at",
    ),
    "empty file": (lambda folder: _file(folder).write_bytes(b""), "not a safetensors file"),
    "file missing": (lambda folder: _file(folder).unlink(), "differ in"),
    "file too many": (lambda folder: shutil.copy(_file(folder), folder / "x.safetensors"), "differ in"),
    "folder missing": (lambda folder: shutil.rmtree(folder), "version missing"),
    "index missing": (lambda folder: (folder / INDEX_FILE).unlink(), "full version differs|in two files|is both in"),
    "index cut": (lambda folder: _truncate(folder / INDEX_FILE), "not JSON"),
    "wrong base": (lambda folder: rewrite_index(folder, base_version="000000"), "checksum|starts from"),
    "base after it": (lambda folder: rewrite_index(folder, base_version="000009"), "on base 9"),
    "wrong number": (lambda folder: rewrite_index(folder, version="000007"), "states version 7"),
    "no number": (lambda folder: rewrite_index(folder, version="../1"), "version is '../1'"),
    "encoding unknown": (lambda folder: rewrite_index(folder, delta_encoding="pickle"), "delta_encoding 'pickle'"),
    "encoding lost": (lambda folder: rewrite_index(folder, delta_encoding=None), "no delta_encoding"),
    "compression unknown": (lambda folder: rewrite_index(folder, compression_format="gzip"), "compression_format"),
    "path escapes": (
        lambda folder: _weight_map(folder, lambda names: names.update(norm="../base/model.safetensors")),
        "the same folder",
    ),
    "link escapes": (_link_out, "points outside its folder"),
}
BYTE_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensor unknown": (_rename_tensor, "does not have: stranger"),
    "tensors exchanged": (_swap_tensors, "checksum"),
    "checksum unknown": (lambda folder: rewrite_index(folder, checksum_format="md5"), "checksum_format 'md5'"),
}
CASES = [(encoding, fault) for encoding in ENCODINGS for fault in FAULTS]
CASES += [(encoding, fault) for encoding in ("xor", "overwrite") for fault in BYTE_FAULTS]


@pytest.mark.parametrize(("encoding", "fault"), CASES)
def test_a_wrong_version_is_refused_and_the_old_one_stays(stream: Stream, encoding: str, fault: str) -> None:
    damage, reason = (FAULTS | BYTE_FAULTS)[fault]
    stream.publish("xor")
    pulled(stream, 1)
    version = stream.publish(encoding)
    damage(version_path(stream.source, version))
    before = contents(stream.local)
    with pytest.raises(WeightSyncError, match=reason) as caught:
        pulled(stream, version)
    assert caught.value.status_code in (400, 409)
    assert contents(stream.local) == before
    assert same_bits(read_checkpoint(stream.local), stream.versions[1])


def test_a_checksum_is_what_refuses_a_wrong_base(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it an xor on the wrong base goes through and is garbage: the test above would see it."""
    stream.publish("xor")
    pulled(stream, 1)
    version = stream.publish("xor")
    rewrite_index(version_path(stream.source, version), base_version="000000")
    monkeypatch.setattr(published, "checksum", lambda name, tensor: "same")
    assert not same_bits(_applied_blindly(stream, version), stream.versions[version])


def _applied_blindly(stream: Stream, version: int) -> dict[str, torch.Tensor]:
    folder = version_dir.read_version(stream.source, version)
    tensors = dict(stream.versions[0])
    metas = {name: TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    for name, patch in version_dir.read_patches(folder, metas):
        assert isinstance(patch, published.BytePatch)
        tensors[name] = dataclasses.replace(patch, stated="same").apply(tensors[name])
    return tensors


def test_a_pull_that_a_crash_cut_off_before_the_decision_leaves_scrap_only(stream: Stream) -> None:
    pulled(stream, 0)
    scrap = stream.local / SYNC_FOLDER / NEXT_FOLDER
    scrap.mkdir()
    (scrap / "model-00000-of-00002.safetensors").write_bytes(b"half")
    stream.publish("xor")
    pulled(stream, 1)
    assert same_bits(read_checkpoint(stream.local), stream.versions[1])
    assert not scrap.exists()


def test_a_full_disk_leaves_the_old_version(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    stream.publish("xor")
    pulled(stream, 1)
    stream.publish("xor")
    before = contents(stream.local)
    real, calls = local_checkpoint.write_at, 0

    def fills_up(path: Path, start: int, chunks: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            path.write_bytes(b"part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, start, chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(local_checkpoint, "write_at", fills_up)
    with pytest.raises(LocalCheckpointError, match="No space left"):
        pulled(stream, 2)
    assert contents(stream.local) == before
    monkeypatch.undo()
    pulled(stream, 2)
    assert same_bits(read_checkpoint(stream.local), stream.versions[2])


def test_two_pulls_at_once_take_turns(stream: Stream) -> None:
    for _ in range(3):
        stream.publish("xor")
    failures: list[BaseException] = []

    def one(target: int) -> None:
        try:
            pulled(stream, target, timeout_s=30.0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(target,)) for target in (3, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert any(same_bits(read_checkpoint(stream.local), stream.versions[target]) for target in (2, 3))


def test_the_lock_has_a_deadline(stream: Stream) -> None:
    pulled(stream, 0)
    with locked(stream.local / SYNC_FOLDER / LOCK_FILE, shared=True, timeout_s=1.0):
        start = time.monotonic()
        with pytest.raises(TransactionStateError, match="locked by another process"):
            pulled(stream, 0, timeout_s=0.2)
        assert time.monotonic() - start < 2.0


def test_a_folder_that_is_not_ours_is_left_alone(stream: Stream) -> None:
    stream.local.mkdir()
    (stream.local / "thesis.txt").write_text("mine")
    with pytest.raises(WeightRequestError, match="neither empty nor made by a pull"):
        pulled(stream, 0)
    (stream.local / SYNC_FOLDER).mkdir()
    with pytest.raises(WeightRequestError, match="neither empty nor made by a pull"):
        pulled(stream, 0)
    assert contents(stream.local) == {"thesis.txt": b"mine"}


@pytest.mark.parametrize("name", ["x" * 300, "file/below"])
def test_a_place_where_no_folder_can_be_is_refused(stream: Stream, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightRequestError, match="cannot be a folder"):
        pull(tmp_path / name, stream.base, stream.source, 0, timeout_s=5.0)


def test_the_base_and_the_source_are_never_written_to(stream: Stream) -> None:
    stream.publish("xor")
    for local in (stream.base, stream.source, stream.base.parent):
        with pytest.raises(WeightRequestError, match=r"is the same as .* or contains it"):
            pull(local, stream.base, stream.source, 1, timeout_s=1.0)
    assert not (stream.base / SYNC_FOLDER).exists()


@pytest.mark.parametrize("state", ['{"version": "1"', "[]", '{"version": "x"}', '{"version": "1", "files": ["../a"]}'])
def test_a_damaged_state_file_is_refused(stream: Stream, state: str) -> None:
    pulled(stream, 0)
    (stream.local / SYNC_FOLDER / STATE_FILE).write_text(state)
    with pytest.raises(ContentError, match="damaged"):
        pulled(stream, 0)


def test_a_full_version_that_does_not_fit_is_refused_by_the_check(stream: Stream) -> None:
    version = stream.publish("full")

    def check(metas: object) -> None:
        raise ShapeMismatchError("does not fit")

    with pytest.raises(ShapeMismatchError):
        pull(stream.local, stream.base, stream.source, version, timeout_s=1.0, check=check)
    assert read_checkpoint(stream.local) == {}


@pytest.mark.parametrize("target", [-1, 10**13])
def test_absurd_targets_are_refused(stream: Stream, target: int) -> None:
    with pytest.raises(WeightRequestError, match="target_version"):
        pulled(stream, target)


# --- what a published delta may unpack to (W10) -----------------------------------------------------------------------


@contextlib.contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Check that arrays and objects of Python take at most `num_bytes` at any time in the block."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["stranger", "x"])
def test_w10_a_delta_unpacks_nothing_that_the_base_does_not_have(tmp_path: Path, name: str) -> None:
    """A few kB would unpack to 128 MiB of a tensor that the model lacks or has smaller: they are refused unopened."""
    base, source = checkpoint(tmp_path / "base", {"x": torch.ones(8, dtype=torch.bfloat16)}), tmp_path / "source"
    numel = 64 << 20
    tensors, sizes = (
        TensorList([TensorMeta(name, torch.bfloat16, (numel,))]),
        size_table((0, True, (0,) * 4 + (2 * numel,))),
    )
    packed, prints = (*[compress(b"")] * 4, compress(bytes(2 * numel))), np.ones((1, 2), dtype=np.uint64)
    frame = DeltaFrame(tensors, sizes, prints, "0" * 64, "1" * 64, packed)
    publish_encoded(source, 1, EncodedDelta((frame,), "0" * 64, "1" * 64, 2 * numel, numel, [], prints[:, 1]))
    assert sum(file.stat().st_size for file in source.rglob("*")) < 64 << 10
    with at_most(32 << 20), pytest.raises(ContentError, match=name):
        pull(tmp_path / "local", base, source, 1, timeout_s=5)


def test_w10_a_chain_is_unpacked_tensor_by_tensor(tmp_path: Path) -> None:
    """Five versions in which all of twelve tensors of 128 KiB change: a few tensors are unpacked at a time."""
    tensors = {f"t{number:02}": torch.zeros(64 << 10, dtype=torch.int16) for number in range(12)}
    base, source = checkpoint(tmp_path / "base", tensors), tmp_path / "source"
    encoder = DeltaEncoder(tensors.items())
    for version in range(1, 6):
        tensors = {name: tensor + version * 257 for name, tensor in tensors.items()}
        delta = encoder.encode(tensors.items())
        publish_encoded(source, version, delta)
        encoder.advance(delta)
    with at_most(4 << 20):
        pull(tmp_path / "local", base, source, 5, timeout_s=5)
    pulled = load_file(tmp_path / "local" / "model.safetensors")
    assert all(torch.equal(pulled[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("seed", range(60))
def test_w10_a_damaged_frame_is_refused_within_bounds(tmp_path: Path, seed: int) -> None:
    """Any bytes of a published frame are changed: the pull makes the right version, or nothing."""
    rng = random.Random(seed)
    tensors = {"x": torch.arange(4096, dtype=torch.int16), "y": torch.ones(16)}
    base, source = checkpoint(tmp_path / "base", tensors), tmp_path / "source"
    new = {name: tensor + 1 for name, tensor in tensors.items()}
    file = next(publish_encoded(source, 1, DeltaEncoder(tensors.items()).encode(new.items())).glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 2, 8))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    file.write_bytes(content[: rng.choice((len(content), rng.randrange(len(content))))])
    try:
        with at_most(8 << 20):
            pull(tmp_path / "local", base, source, 1, timeout_s=5)
    except WeightSyncError:
        assert not (tmp_path / "local" / "model.safetensors").exists()
    else:
        pulled = load_file(tmp_path / "local" / "model.safetensors")
        assert all(torch.equal(pulled[name], tensor) for name, tensor in new.items())
