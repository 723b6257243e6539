"""The wire forms of routed experts.  Pure functions between them and `RoutedExperts`.

The first two forms can be read back; of the others `decode_npy` reads the array alone.

Compatible form: base64 of little-endian int32, shape (rows, num_hidden_layers, K), dense layers all zero; it carries
no header, so the reader must know the model.  This is SGLang's wire form.

Compact form: one safetensors file.  Its tensor `routed_experts` is [T, L, K] in the narrowest unsigned dtype, its
metadata states everything else and carries a CRC32 over metadata, dtype, shape and data.

Array forms, of vLLM's family: one array of every hidden layer, dense layers zero, with its shape and dtype; none states
which weights made a row.

Shapes: T rows, L MoE layers, H hidden layers, K top-k.
"""

from __future__ import annotations

import ast
import base64
import binascii
import io
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save

from capture.errors import MissingRowsError, RouteFormatError
from capture.routed_experts import RoutedExperts, id_dtype, narrowest_dtype

FORMAT_VERSION = "1"
TENSOR_NAME = "routed_experts"

_WIRE_DTYPES: dict[str, np.dtype] = {"U8": np.dtype("<u1"), "U16": np.dtype("<u2")}
_METADATA_KEYS = frozenset(
    {"format_version", "num_experts", "num_hidden_layers", "moe_layer_ids", "start", "weight_versions", "crc32"}
)
_LENGTH_BYTES = 8
NPY_MAGIC = b"\x93NUMPY"
_NPY_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}  # of the header's length, by the format's version
_NPY_HEADER_BYTES = 1024  # numpy writes 118 for three dimensions
_NPY_DTYPE = re.compile(r"[<>|=]?[iu][1248]")


def encode_compatible(routed: RoutedExperts) -> str:
    """Return base64 of an int32 array (rows, num_hidden_layers, K); the empty string if there are no rows.

    Raises `MissingRowsError` if a row is MISSING: this form cannot express it.
    """
    wide = all_layers(routed, np.dtype("<i4"))
    return base64.b64encode(wide.data if wide.size else b"").decode("ascii")


def all_layers(routed: RoutedExperts, dtype: np.dtype) -> np.ndarray:
    """Return an array [rows, num_hidden_layers, K] of `dtype` with zeros for the dense layers.

    Raises `MissingRowsError` if a row is MISSING.
    """
    if not routed.complete:
        missing = routed.missing_rows()
        raise MissingRowsError(f"{len(missing)} of {len(routed)} rows were not recorded, the first is {missing[0]}")
    if len(routed.moe_layer_ids) == routed.num_hidden_layers:  # all of them
        return routed.logical_ids_TLK.astype(dtype, order="C")
    wide = np.zeros((len(routed), routed.num_hidden_layers, routed.top_k), dtype=dtype)
    wide[:, list(routed.moe_layer_ids)] = routed.logical_ids_TLK
    return wide


def decode_compatible(
    text: str,
    num_hidden_layers: int,
    top_k: int,
    moe_layer_ids: Sequence[int],
    num_experts: int,
    start: int = 0,
) -> RoutedExperts:
    """Decode the record in the compatible form, given the model it came from.

    Raises `RouteFormatError` for text that is not base64, a size that is not whole rows, or a dense layer that is not
    zero; `RouteValueError` for ids that the model does not have.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RouteFormatError(f"routed experts are not base64: {error}") from None
    if num_hidden_layers < 1 or top_k < 1 or len(data) % (num_hidden_layers * top_k * 4):
        raise RouteFormatError(
            f"{len(data)} bytes are not a multiple of a row of {num_hidden_layers} layers x top-{top_k} x 4 bytes"
        )
    wide = np.frombuffer(data, dtype="<i4").reshape(-1, num_hidden_layers, top_k)
    if any(not 0 <= layer < num_hidden_layers for layer in moe_layer_ids):
        raise RouteFormatError(f"MoE layers {list(moe_layer_ids)} are not in a model of {num_hidden_layers} layers")
    ids_TLK = wide[:, list(moe_layer_ids)]
    dense = np.ones(num_hidden_layers, dtype=bool)
    dense[list(moe_layer_ids)] = False
    if wide[:, dense].any():
        raise RouteFormatError("a dense layer has expert ids: the MoE layer indices are wrong or the data is damaged")
    if ids_TLK.size and (ids_TLK.min() < 0 or ids_TLK.max() >= num_experts):
        raise RouteFormatError(f"expert ids span {ids_TLK.min()}..{ids_TLK.max()}, outside 0..{num_experts - 1}")
    return RoutedExperts(
        ids_TLK.astype(id_dtype(num_experts)), num_experts, tuple(moe_layer_ids), num_hidden_layers, start
    )


def encode_compact(routed: RoutedExperts) -> bytes:
    """Return the bytes of a safetensors file that holds all of `routed`, MISSING rows included."""
    ids_TLK = np.ascontiguousarray(routed.logical_ids_TLK)
    metadata = {
        "format_version": FORMAT_VERSION,
        "num_experts": str(routed.num_experts),
        "num_hidden_layers": str(routed.num_hidden_layers),
        "moe_layer_ids": json.dumps(list(routed.moe_layer_ids)),
        "start": str(routed.start),
        "weight_versions": json.dumps([list(span) for span in routed.weight_versions]),
    }
    dtype_tag = "U8" if ids_TLK.dtype.itemsize == 1 else "U16"
    little_endian = ids_TLK.astype(_WIRE_DTYPES[dtype_tag], copy=False)
    metadata["crc32"] = _checksum(metadata, dtype_tag, ids_TLK.shape, little_endian.tobytes())
    return save({TENSOR_NAME: ids_TLK}, metadata)


def decode_compact(data: bytes) -> RoutedExperts:
    """Decode the record in the compact form.  Nothing is allocated for a size that the data does not have.

    The ids of the result are a view of `data`.  Raises `RouteFormatError` or `RouteValueError` for anything but an
    undamaged record.
    """
    header, payload = _split_file(data)
    metadata, dtype_tag, shape = _checked_header(header, len(payload))
    if metadata["crc32"] != _checksum(metadata, dtype_tag, shape, payload):
        raise RouteFormatError("checksum mismatch: the route record is damaged")
    if metadata["format_version"] != FORMAT_VERSION:
        raise RouteFormatError(
            f"the route record has format {metadata['format_version']!r}; this version reads {FORMAT_VERSION!r}"
        )
    num_experts = _parse_int(metadata, "num_experts")
    ids_TLK = np.frombuffer(payload, dtype=_WIRE_DTYPES[dtype_tag]).reshape(shape)
    return RoutedExperts(
        ids_TLK.astype(ids_TLK.dtype.newbyteorder("="), copy=False),
        num_experts,
        _parse_layers(metadata),
        _parse_int(metadata, "num_hidden_layers"),
        _parse_int(metadata, "start"),
        _parse_spans(metadata),
    )


# --- array forms: they raise `MissingRowsError` if a row is MISSING, as they cannot express it ------------------------


def encode_npy(routed: RoutedExperts) -> str:
    """Return base64 of a .npy file [T, H, K], uint8 up to 256 experts and else uint16: vLLM's own form."""
    file = io.BytesIO()
    np.save(file, all_layers(routed, _model_dtype(routed)))
    return base64.b64encode(file.getbuffer()).decode("ascii")


def decode_npy(data: bytes) -> np.ndarray:
    """Return the integers in a .npy file, as a view of `data`.

    Nothing is allocated for a shape that the data does not have.  Raises `RouteFormatError` for anything but a whole
    file of integers.
    """
    descr, is_fortran, shape, start = _npy_header(data)
    dtype = np.dtype(descr)
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise RouteFormatError(f"shape {list(shape)} of {dtype} does not match the {len(data) - start} bytes of data")
    array = np.frombuffer(data, dtype, offset=start)
    return array.reshape(shape, order="F" if is_fortran else "C")


def encode_dict(routed: RoutedExperts) -> dict[str, Any]:
    """Return prime-rl's form: `data` (base64 of the array's bytes), `shape`, `start` and `dtype`.

    Its clients cut `data` out.
    """
    fields = _envelope(all_layers(routed, _model_dtype(routed)))
    return {"data": fields["data"], "shape": fields["shape"], "start": routed.start, "dtype": fields["dtype"]}


def encode_packed(routed: RoutedExperts) -> dict[str, Any]:
    """Return SkyRL's form: `data`, `shape` and `dtype`, the narrowest of uint8, int16 and int32 for these very ids."""
    highest = int(routed.logical_ids_TLK.max(initial=0))
    return _envelope(all_layers(routed, narrowest_dtype(highest + 1, for_torch=True)))


def _model_dtype(routed: RoutedExperts) -> np.dtype:
    """Return the dtype that all samples of a model share, so that a trainer can join them."""
    return narrowest_dtype(routed.num_experts)


def _envelope(ids_THK: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(ids_THK.data if ids_THK.size else b"").decode("ascii")
    return {"data": data, "shape": list(ids_THK.shape), "dtype": ids_THK.dtype.name}


# --- reading a .npy file ---------------------------------------------------------------------------------------------


def _npy_header(data: bytes) -> tuple[str, bool, tuple[int, ...], int]:
    """Return the type, order and shape of the array, and the position where its data begins."""
    version = data[len(NPY_MAGIC)] if data.startswith(NPY_MAGIC) and len(data) > len(NPY_MAGIC) else 0
    length_bytes = _NPY_LENGTH_BYTES.get(version)
    if length_bytes is None:
        raise RouteFormatError("the data is not a .npy file of version 1, 2 or 3")
    begin = len(NPY_MAGIC) + 2 + length_bytes
    size = int.from_bytes(data[begin - length_bytes : begin], "little")
    if size > _NPY_HEADER_BYTES or begin + size > len(data):
        raise RouteFormatError(f"the header of the .npy file has {size} bytes; at most {_NPY_HEADER_BYTES} are read")
    try:
        header = ast.literal_eval(data[begin : begin + size].decode("ascii").strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise RouteFormatError("the header of the .npy file is not a Python literal") from None
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise RouteFormatError("the header of the .npy file does not have exactly descr, fortran_order and shape")
    descr, is_fortran, shape = header["descr"], header["fortran_order"], header["shape"]
    if not isinstance(descr, str) or not _NPY_DTYPE.fullmatch(descr):
        raise RouteFormatError("the .npy file does not hold integers")
    if not isinstance(is_fortran, bool):
        raise RouteFormatError("fortran_order of the .npy file is not a bool")
    if not isinstance(shape, tuple) or len(shape) > 8 or not all(_is_count(size) for size in shape):
        raise RouteFormatError("the shape of the .npy file is not a tuple of sizes")
    return descr, is_fortran, shape, begin + size


# --- reading the compact form ---------------------------------------------------------------------------------------


def _split_file(data: bytes) -> tuple[Any, memoryview]:
    if len(data) < _LENGTH_BYTES:
        raise RouteFormatError(f"{len(data)} bytes are too few for a route record")
    header_len = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header_end = _LENGTH_BYTES + header_len
    if header_end > len(data):
        raise RouteFormatError(f"the header claims {header_len} bytes, the record has {len(data)} in all")
    return _parse_json(data[_LENGTH_BYTES:header_end], "header"), memoryview(data)[header_end:]


def _checked_header(header: Any, payload_len: int) -> tuple[dict[str, str], str, tuple[int, ...]]:
    if not isinstance(header, dict) or header.keys() != {"__metadata__", TENSOR_NAME}:
        raise RouteFormatError(f"the record must hold metadata and the one tensor {TENSOR_NAME!r}")
    metadata, tensor = header["__metadata__"], header[TENSOR_NAME]
    if not isinstance(metadata, dict) or metadata.keys() != _METADATA_KEYS:
        raise RouteFormatError(f"the metadata must have exactly the keys {sorted(_METADATA_KEYS)}")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise RouteFormatError("metadata values must be strings")
    if not isinstance(tensor, dict) or tensor.keys() != {"dtype", "shape", "data_offsets"}:
        raise RouteFormatError("the tensor entry must have dtype, shape and data_offsets")
    dtype_tag, shape = tensor["dtype"], tensor["shape"]
    if not isinstance(dtype_tag, str) or dtype_tag not in _WIRE_DTYPES:
        raise RouteFormatError(f"the dtype is not one of {sorted(_WIRE_DTYPES)}")
    if not isinstance(shape, list) or len(shape) != 3 or not all(_is_count(size) for size in shape):
        raise RouteFormatError("the shape is not [T, L, K]")
    num_bytes = math.prod(shape) * _WIRE_DTYPES[dtype_tag].itemsize
    if num_bytes != payload_len or tensor["data_offsets"] != [0, num_bytes]:
        raise RouteFormatError(f"shape {shape} needs {num_bytes} bytes, the record has {payload_len}")
    return metadata, dtype_tag, tuple(shape)


def _checksum(metadata: Mapping[str, str], dtype_tag: str, shape: Sequence[int], payload: bytes | memoryview) -> str:
    facts = {key: value for key, value in metadata.items() if key != "crc32"}
    head = json.dumps([facts, dtype_tag, list(shape)], sort_keys=True).encode("ascii")
    return f"{zlib.crc32(payload, zlib.crc32(head)):08x}"


def _parse_int(metadata: Mapping[str, str], key: str) -> int:
    text = metadata[key]
    # 18 digits fit int64; longer ones would be nonsense that only costs time to convert.
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise RouteFormatError(f"metadata {key} is not a count: {text[:40]!r}")
    return int(text)


def _parse_layers(metadata: Mapping[str, str]) -> tuple[int, ...]:
    layers = _parse_json(metadata["moe_layer_ids"], "moe_layer_ids")
    if not isinstance(layers, list) or not all(_is_count(layer) for layer in layers):
        raise RouteFormatError("metadata moe_layer_ids is not a list of layer indices")
    return tuple(layers)


def _parse_spans(metadata: Mapping[str, str]) -> tuple[tuple[str, int, int], ...]:
    spans = _parse_json(metadata["weight_versions"], "weight_versions")
    if not isinstance(spans, list) or not all(_is_span(span) for span in spans):
        raise RouteFormatError("metadata weight_versions is not a list of [version, first row, end row]")
    return tuple((version, first, end) for version, first, end in spans)


def _parse_json(text: str | bytes, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RouteFormatError(f"the {what} is not JSON: {type(error).__name__}") from None


def _is_span(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and isinstance(value[0], str)
        and _is_count(value[1])
        and _is_count(value[2])
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48
