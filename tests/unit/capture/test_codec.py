from __future__ import annotations

import base64
import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from capture.codec import _checksum, decode_compact, decode_compatible, encode_compact, encode_compatible
from capture.errors import CaptureError, MissingRowsError, RouteFormatError, RouteValueError
from capture.routed_experts import RoutedExperts, id_dtype, missing_id
from tests.tiers import examples

VERSIONS = st.text('a1\\"é😀\n', max_size=4)
thorough = settings(deadline=None, max_examples=examples(150))


@st.composite
def routed_records(draw, with_missing=True):
    num_experts = draw(st.sampled_from([2, 8, 255, 256, 1000, 65535]))
    hidden = draw(st.integers(1, 5))
    layers = tuple(sorted(draw(st.sets(st.integers(0, hidden - 1), min_size=1))))
    num_rows = draw(st.integers(0, 6))
    top_k = draw(st.integers(1, min(3, num_experts)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    offsets = np.argsort(rng.random((num_rows, len(layers), top_k)), axis=-1)
    ids = ((rng.integers(0, num_experts, (num_rows, len(layers), 1)) + offsets) % num_experts).astype(
        id_dtype(num_experts)
    )
    if with_missing and num_rows:
        ids[draw(st.lists(st.integers(0, num_rows - 1)))] = missing_id(num_experts)
    cuts = sorted(draw(st.sets(st.integers(0, num_rows), max_size=3)))
    spans = tuple((draw(VERSIONS), a, b) for a, b in pairwise(cuts))
    return RoutedExperts(ids, num_experts, layers, hidden, draw(st.integers(0, 10**9)), spans)


def example_record():
    ids = np.array([[[0, 3], [2, 1]], [[1, 2], [3, 0]]], dtype=np.uint8)
    return RoutedExperts(ids, 4, (1, 2), 4, 7, (("step-1é", 0, 1), ("step-2", 1, 2)))


def rebuilt(data, change):
    """Return the record's bytes after `change(header)` has changed the parsed header."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def test_compatible_form_byte_for_byte():
    wide = np.zeros((2, 4, 2), dtype="<i4")
    wide[:, 1] = [[0, 3], [1, 2]]
    wide[:, 2] = [[2, 1], [3, 0]]
    assert encode_compatible(example_record()) == base64.b64encode(wide.tobytes()).decode()


@thorough
@given(routed_records(with_missing=False))
def test_the_compatible_form_decodes_to_the_record_without_spans(routed):
    text = encode_compatible(routed)
    assert len(base64.b64decode(text)) == len(routed) * routed.num_hidden_layers * routed.top_k * 4
    back = decode_compatible(
        text, routed.num_hidden_layers, routed.top_k, routed.moe_layer_ids, routed.num_experts, routed.start
    )
    without_spans = RoutedExperts(
        routed.logical_ids_TLK, routed.num_experts, routed.moe_layer_ids, routed.num_hidden_layers, routed.start
    )
    assert back == without_spans


def test_no_rows_are_the_empty_string():
    empty = example_record().rows(0, 0)
    assert encode_compatible(empty) == ""
    assert len(decode_compatible("", 4, 2, (1, 2), 4)) == 0


def test_compatible_form_refuses_missing_rows():
    ids = example_record().logical_ids_TLK.copy()
    ids[1] = missing_id(4)
    with pytest.raises(MissingRowsError, match="1 of 2 rows"):
        encode_compatible(RoutedExperts(ids, 4, (1, 2), 4))


@pytest.mark.parametrize(
    ("text", "layers", "top_k", "moe_layers", "num_experts"),
    [
        ("not base64!", 4, 2, (1, 2), 4),
        ("é", 4, 2, (1, 2), 4),
        ("AAAA", 4, 2, (1, 2), 4),
        (encode_compatible(example_record()), 3, 2, (1, 2), 4),
        (encode_compatible(example_record()), 4, 2, (0, 1), 4),
        (encode_compatible(example_record()), 4, 2, (1, 9), 4),
        (encode_compatible(example_record()), 4, 2, (1, 2), 3),
        (encode_compatible(example_record()), 0, 2, (1, 2), 4),
        (encode_compatible(example_record()), -1, -1, (1, 2), 4),
    ],
)
def test_compatible_form_refuses_what_does_not_fit_the_model(text, layers, top_k, moe_layers, num_experts):
    with pytest.raises(RouteFormatError):
        decode_compatible(text, layers, top_k, moe_layers, num_experts)


def test_compatible_form_refuses_zero_filled_rows():
    zeros = base64.b64encode(bytes(2 * 4 * 2 * 4)).decode()
    with pytest.raises(RouteValueError, match="twice"):
        decode_compatible(zeros, 4, 2, (1, 2), 4)


@thorough
@given(routed_records())
def test_compact_round_trip_and_is_a_safetensors_file(routed):
    data = encode_compact(routed)
    assert decode_compact(data) == routed
    assert np.array_equal(load(data)["routed_experts"], routed.logical_ids_TLK)


@thorough
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    with pytest.raises(CaptureError):
        decode_compact(data)


@thorough
@given(st.binary(max_size=300))
def test_random_headers_are_refused(text):
    with pytest.raises(CaptureError):
        decode_compact(len(text).to_bytes(8, "little") + text)


@thorough
@given(routed_records(), st.data())
def test_a_flipped_bit_never_gives_other_content(routed, data):
    record = bytearray(encode_compact(routed))
    position = data.draw(st.integers(0, len(record) - 1))
    record[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoded = decode_compact(bytes(record))
    except CaptureError:
        return
    # The case of a hexadecimal digit in a JSON escape is the one thing that may differ without a meaning.
    assert decoded == routed


def test_every_single_flipped_bit_of_one_record_is_found():
    record = encode_compact(example_record().rows(1, 2))
    for position in range(len(record)):
        for bit in range(8):
            damaged = bytearray(record)
            damaged[position] ^= 1 << bit
            with pytest.raises(CaptureError):
                decode_compact(bytes(damaged))


def test_every_truncation_and_any_tail_is_found():
    record = encode_compact(example_record())
    for length in range(len(record)):
        with pytest.raises(RouteFormatError):
            decode_compact(record[:length])
    with pytest.raises(RouteFormatError):
        decode_compact(record + b"\0")


def test_a_change_of_metadata_fails_the_checksum():
    record = encode_compact(example_record())
    for key, value in [("start", "8"), ("num_experts", "5"), ("weight_versions", "[]"), ("format_version", "2")]:
        with pytest.raises(RouteFormatError, match="checksum"):
            decode_compact(rebuilt(record, lambda header, k=key, v=value: header["__metadata__"].update({k: v})))


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [2**47, 2**47, 2**47]},
        {"shape": [10**4000, 10**4000, 2]},
        {"shape": [2**47, 0, 2], "data_offsets": [0, 0]},
        {"shape": [-2, -2, 2]},
        {"shape": [True, 2, 2]},
        {"shape": [8]},
        {"dtype": "F32"},
        {"dtype": ["U8"]},
        {"data_offsets": [1, 9]},
        {"extra": 1},
    ],
)
def test_a_lying_tensor_entry_is_refused_before_anything_is_allocated(entry):
    record = encode_compact(example_record())
    with pytest.raises(RouteFormatError):
        decode_compact(rebuilt(record, lambda header: header["routed_experts"].update(entry)))


@pytest.mark.parametrize("header", [b"[" * 100_000, b"9" * 10_000, b"null", b"[]", b"{}", b"\xff\xfe", b'{"a":NaN}'])
def test_hostile_json_is_refused(header):
    with pytest.raises(RouteFormatError):
        decode_compact(len(header).to_bytes(8, "little") + header)


def test_a_header_longer_than_the_record_is_refused():
    with pytest.raises(RouteFormatError, match="claims"):
        decode_compact((2**63).to_bytes(8, "little") + b"{}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("start", "-1"),
        ("start", "٣"),
        ("start", "9" * 5000),
        ("num_experts", "70000"),
        ("moe_layer_ids", "[1,"),
        ("moe_layer_ids", "[true, 2]"),
        ("moe_layer_ids", "{}"),
        ("weight_versions", '[["a", 0]]'),
        ("weight_versions", '[["a", 0, 99]]'),
        ("weight_versions", "[" * 50_000),
        ("format_version", "2"),
    ],
)
def test_nonsense_under_a_right_checksum_is_refused(key, value):
    """A faulty or hostile writer can send content that makes no sense under a checksum that holds."""
    record = encode_compact(example_record())

    def change(header):
        metadata = header["__metadata__"]
        metadata[key] = value
        metadata["crc32"] = _checksum(metadata, "U8", (2, 2, 2), example_record().logical_ids_TLK.tobytes())

    with pytest.raises(CaptureError):
        decode_compact(rebuilt(record, change))


@pytest.mark.mutant
def test_a_decoder_that_skips_the_checksum_would_be_caught(monkeypatch):
    """The bit-flip test can fail: with the checksum made constant, a flipped data bit goes unnoticed."""
    monkeypatch.setattr("capture.codec._checksum", lambda *arguments: "00000000")
    ids = np.array([[[0, 2]]], dtype=np.uint8)
    record = bytearray(encode_compact(RoutedExperts(ids, 4, (0,), 1)))
    record[-1] ^= 1
    assert decode_compact(bytes(record)).logical_ids_TLK.tolist() == [[[0, 3]]]


def test_21_nemo_rl_3292_a_record_is_a_byte_a_choice() -> None:
    """The record is of a model with 128 experts, 48 layers and 8 experts a token, over 4,000 tokens."""
    random = np.random.default_rng(0)
    ids_TLK = random.random((4000, 48, 128)).argsort(axis=2)[:, :, :8].astype(id_dtype(128))
    routed = RoutedExperts(ids_TLK, 128, tuple(range(48)), 48)
    size = len(encode_compact(routed))
    assert ids_TLK.size <= size < ids_TLK.size + 1024
    assert len(json.dumps(ids_TLK[:100].tolist())) * 40 > 4 * size  # wrong: lists of numbers
    assert len(encode_compatible(routed)) > 5 * size
