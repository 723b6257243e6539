"""Delta folders with a manifest, as SkyRL publishes them: pulled bit for bit, and everything wrong is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.delta_models import same_bits
from tests.published_versions import Stream, read_checkpoint, write_checkpoint
from tests.skyrl_deltas import change_entry, change_manifest, write_delta
from weight_sync.delta.local_checkpoint import PullResult, pull
from weight_sync.delta.local_state import read_state
from weight_sync.errors import ContentError, WeightRequestError, WeightSyncError

torch.set_num_threads(1)


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    """Three versions on top of version 0, none of them published."""
    found = Stream(tmp_path)
    for _ in range(3):
        found.step()
    return found


def publish(stream: Stream, version: int) -> Path:
    return write_delta(stream.source, version, stream.versions[version - 1], stream.versions[version])


def pulled(stream: Stream, version: int) -> PullResult:
    return pull(stream.local, stream.base, stream.source, version, timeout_s=1.0)


def test_a_chain_of_deltas_leads_to_the_same_bits(stream: Stream) -> None:
    for version in (1, 2, 3):
        publish(stream, version)
    assert pulled(stream, 2).num_deltas == 2
    assert same_bits(read_checkpoint(stream.local), stream.versions[2])
    result = pulled(stream, 3)
    assert (result.start, result.num_deltas) == (2, 1)
    assert same_bits(read_checkpoint(stream.local), stream.versions[3])
    assert pulled(stream, 3).written_bytes == 0


def test_a_tensor_that_did_not_change_is_left_out(stream: Stream) -> None:
    new = stream.versions[0] | {"norm": stream.versions[1]["norm"]}
    write_delta(stream.source, 1, stream.versions[0], new)
    assert pulled(stream, 1).num_patched == 1
    assert same_bits(read_checkpoint(stream.local), new)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def first_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def flipped_byte(folder: Path) -> None:
    flip(first_file(folder), -3)


def truncated(folder: Path) -> None:
    first_file(folder).write_bytes(first_file(folder).read_bytes()[:-3])


def no_payload_file(folder: Path) -> None:
    first_file(folder).unlink()


def half_a_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:100])


def a_link_outside(folder: Path) -> None:
    file = first_file(folder)
    file.rename(folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")


def a_file_outside(folder: Path) -> None:
    files = json.loads((folder / "manifest.json").read_text())["payload_files"]
    first_file(folder).rename(folder.parent / "outside.safetensors")
    change_manifest(folder, payload_files=[*files[1:], "../outside.safetensors"])
    change_entry(folder, payload_file="../outside.safetensors")


WRONG: list[tuple[Callable[[Path], None], str]] = [
    (flipped_byte, "zstd frame|checksum"),
    (truncated, "its header describes"),
    (no_payload_file, "is missing"),
    (half_a_manifest, "is not JSON"),
    (a_link_outside, "points outside its folder"),
    (a_file_outside, "must be in the same folder"),
    (lambda folder: change_entry(folder, payload_file="unlisted.safetensors"), "does not list"),
    (lambda folder: change_entry(folder, payload_key="other"), "has no payload"),
    (lambda folder: change_entry(folder, checksum="0" * 32), "has checksum"),
    (lambda folder: change_entry(folder, checksum=None), "has no checksum"),
    (lambda folder: change_entry(folder, checksum_algorithm="crc32"), "unknown checksum_algorithm 'crc32'"),
    (lambda folder: change_entry(folder, checksum_algorithm=None), "unknown checksum_algorithm"),
    (lambda folder: change_entry(folder, uncompressed_num_bytes=7), "has sizes"),
    (lambda folder: change_entry(folder, compressed_num_bytes=7), "has sizes"),
    (lambda folder: change_entry(folder, name="stranger"), "does not have"),
    (lambda folder: change_entry(folder, dtype="float16"), "its base does not have"),
    (lambda folder: change_entry(folder, dtype="complex"), "unknown dtype"),
    (lambda folder: change_entry(folder, shape=[30, 32]), "its base does not have"),
    (lambda folder: change_entry(folder, shape="60"), "malformed"),
    (lambda folder: change_entry(folder, name="layer.0"), "twice"),
    (lambda folder: change_manifest(folder, version=2), "states version 2"),
    (lambda folder: change_manifest(folder, base_version=1), "on base 1"),
    (lambda folder: change_manifest(folder, base_version="0"), "base_version is '0'"),
    (lambda folder: change_manifest(folder, tensors={}), "lacks its tensors"),
]


@pytest.mark.parametrize(("wrong", "reason"), WRONG)
def test_what_is_wrong_is_refused_and_changes_nothing(
    stream: Stream, wrong: Callable[[Path], None], reason: str
) -> None:
    wrong(publish(stream, 1))
    with pytest.raises(WeightSyncError, match=reason):
        pulled(stream, 1)
    assert read_state(stream.local).applied is None
    assert not read_checkpoint(stream.local)


def test_a_wrong_base_is_refused(stream: Stream) -> None:
    """The delta of another version under this number: its checksum is of content that does not come out."""
    publish(stream, 1)
    pulled(stream, 1)
    write_delta(stream.source, 2, stream.versions[2], stream.versions[3])
    with pytest.raises(ContentError, match="another base"):
        pulled(stream, 2)
    assert same_bits(read_checkpoint(stream.local), stream.versions[1])


def test_a_gap_in_the_chain_is_refused(stream: Stream) -> None:
    publish(stream, 1)
    pulled(stream, 1)
    publish(stream, 3)
    with pytest.raises(WeightRequestError, match="published weight version missing"):
        pulled(stream, 3)
    assert same_bits(read_checkpoint(stream.local), stream.versions[1])


def test_the_other_form_of_a_version_comes_first(stream: Stream) -> None:
    """A number is looked for in slime's form, then in SkyRL's."""
    publish(stream, 1)
    write_checkpoint(stream.source / "weight_v000001", stream.versions[2])
    pulled(stream, 1)
    assert same_bits(read_checkpoint(stream.local), stream.versions[2])
