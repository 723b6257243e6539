"""vLLM's, prime-rl's and SkyRL's forms of routed experts: shapes, dtypes, dense layers, order of fields."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from capture.codec import encode_dict, encode_npy, encode_packed
from capture.errors import MissingRowsError
from capture.routed_experts import RoutedExperts, id_dtype, missing_id


def record(num_experts: int, highest: int, num_rows: int = 2) -> RoutedExperts:
    """Return a record from position 7 on: [highest, 0] in layer 1 and [0, highest] in layer 2 of 4 layers."""
    ids = np.tile(np.array([[[highest, 0], [0, highest]]], dtype=id_dtype(num_experts)), (num_rows, 1, 1))
    return RoutedExperts(ids, num_experts, (1, 2), 4, 7)


def expected(highest: int, num_rows: int = 2) -> np.ndarray:
    return np.tile(np.array([[[0, 0], [highest, 0], [0, highest], [0, 0]]]), (num_rows, 1, 1))


@pytest.mark.parametrize(
    ("num_experts", "highest", "of_model", "of_ids"),
    [(8, 7, "uint8", "uint8"), (256, 255, "uint8", "uint8"), (384, 9, "uint16", "uint8"),
     (384, 300, "uint16", "int16"), (65535, 40000, "uint16", "int32")],
)  # fmt: skip
def test_dtypes_follow_the_number_of_experts_or_the_highest_id(
    num_experts: int, highest: int, of_model: str, of_ids: str
) -> None:
    routed = record(num_experts, highest)
    rows = np.load(io.BytesIO(base64.b64decode(encode_npy(routed))))
    assert rows.dtype == of_model and np.array_equal(rows, expected(highest))
    for fields, dtype in ((encode_dict(routed), of_model), (encode_packed(routed), of_ids)):
        rows = np.frombuffer(base64.b64decode(fields["data"]), dtype=fields["dtype"]).reshape(fields["shape"])
        assert fields["dtype"] == dtype and np.array_equal(rows, expected(highest))


def test_the_order_of_fields() -> None:
    """`data` comes first: clients look for its bytes right behind the name."""
    assert list(encode_dict(record(8, 1))) == ["data", "shape", "start", "dtype"]
    assert list(encode_packed(record(8, 1))) == ["data", "shape", "dtype"]
    assert encode_dict(record(8, 1))["start"] == 7


def test_a_record_without_rows_becomes_empty_arrays() -> None:
    assert np.load(io.BytesIO(base64.b64decode(encode_npy(record(8, 1, 0))))).shape == (0, 4, 2)
    assert encode_packed(record(8, 1, 0)) == {"data": "", "shape": [0, 4, 2], "dtype": "uint8"}


@pytest.mark.parametrize("encode", [encode_npy, encode_dict, encode_packed])
def test_missing_rows_are_refused(encode) -> None:
    ids = np.full((1, 2, 2), missing_id(8), dtype=np.uint8)
    with pytest.raises(MissingRowsError):
        encode(RoutedExperts(ids, 8, (1, 2), 4))
