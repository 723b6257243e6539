"""Routes that a client sends, in any form and damaged in any way: read exactly, or refused with a 400.

Nothing is allocated for what a header only claims.
"""

from __future__ import annotations

import base64
import io
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.codec import (
    NPY_MAGIC,
    decode_npy,
    encode_compact,
    encode_compatible,
    encode_dict,
    encode_npy,
    encode_packed,
)
from capture.errors import RouteFormatError
from capture.routed_experts import RoutedExperts
from rollout.core.errors import BadRequest
from rollout.core.messages.io_struct import ReplayedRoutes, TokenizedGenerateReqInput
from rollout.core.messages.unreadable import Unreadable, packed, read_input
from rollout.core.sampling_params import SamplingParams
from rollout.tokenizer_manager import replay
from rollout.tokenizer_manager.replay import read_replay
from rollout.tokenizer_manager.response import RouteShape
from tests.tiers import examples

SHAPE = RouteShape(num_experts=8, top_k=3, moe_layer_ids=(1, 2), num_hidden_layers=3)
ROWS = 4
FEW_BYTES = 4 << 20


def routes(rows: int = ROWS) -> RoutedExperts:
    generator = np.random.default_rng(rows)
    ids = np.array([[generator.permutation(8)[:3] for _ in range(2)] for _ in range(rows)], dtype=np.uint8)
    return RoutedExperts(ids.reshape(rows, 2, 3), 8, (1, 2), 3)


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy(header: str | bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> str:
    content = header.encode() if isinstance(header, str) else header
    return text(
        NPY_MAGIC + version + len(content).to_bytes(2 if version[:1] == b"\x01" else 4, "little") + content + data
    )


def fields(shape: str, descr: str = "'|u1'", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


FORMS: dict[str, Callable[[RoutedExperts], Any]] = {
    "compatible": encode_compatible,
    "compact": lambda routed: text(encode_compact(routed)),
    "npy": encode_npy,
    "dict": encode_dict,
    "packed": encode_packed,
}

NOT_NPY = {
    "a shape of 8 TiB": npy(fields("(1000000000000, 3, 3)")),
    "a shape beyond 64 bits": npy(fields("(1000000000000000000000000000000, 3, 3)")),
    "a shape of 5000 digits": npy(fields(f"({'9' * 900}, 3, 3)")),
    "a shape with a bool": npy(fields("(True, 3, 3)"), bytes(9)),
    "a negative size": npy(fields("(-1, 3, 3)"), bytes(9)),
    "two negative sizes": npy(fields("(-1, -3, 3)"), bytes(9)),
    "a float as a size": npy(fields("(1.0, 3, 3)"), bytes(9)),
    "a list as a shape": npy(fields("[1, 3, 3]"), bytes(9)),
    "a number as a shape": npy(fields("9"), bytes(9)),
    "data that is too short": npy(fields("(1, 3, 3)"), bytes(8)),
    "data that is too long": npy(fields("(1, 3, 3)"), bytes(10)),
    "objects": npy(fields("(1, 3, 3)", "'|O'"), bytes(72)),
    "text": npy(fields("(1, 3, 3)", "'<U1'"), bytes(36)),
    "floats": npy(fields("(1, 3, 3)", "'<f4'"), bytes(36)),
    "records": npy(fields("(1, 3, 3)", "[('a', '<i4')]"), bytes(36)),
    "a subarray": npy(fields("(1, 3)", "('<u1', (3,))"), bytes(9)),
    "a type of a million": npy(fields("(1, 3, 3)", "'1000000000i1'"), bytes(9)),
    "no type": npy(fields("(1, 3, 3)", "None"), bytes(9)),
    "an order that is no bool": npy(fields("(1, 3, 3)", order="0"), bytes(9)),
    "a header that is no literal": npy("__import__('os').getcwd()"),
    "a header that is nested": npy("(" * 900),
    "a header that is deep and whole": npy("[" * 500 + "]" * 500),
    "a header that is a sum": npy("{'shape': (1 + 2, 3, 3)}"),
    "a header with a null": npy("{'descr'\x00: 1}"),
    "a header that is no ASCII": npy("{'descr': 'ä'}".encode()),
    "a header that is no text": npy(b"\xff\xfe\x00"),
    "a header that is empty": npy(""),
    "a header with more": npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1, 3, 3), 'more': 1}", bytes(9)),
    "a header with less": npy("{'descr': '|u1', 'shape': (1, 3, 3)}", bytes(9)),
    "a header with lists as keys": npy("{[1]: 2}"),
    "a header of 2000 bytes": npy(fields("(1, 3, 3)") + " " * 2000, bytes(9)),
    "a header of 4 GiB": text(NPY_MAGIC + b"\x02\x00\xff\xff\xff\xff" + b"{}"),
    "a header that ends early": text(NPY_MAGIC + b"\x01\x00\xff\x00{}"),
    "no length": text(NPY_MAGIC + b"\x01\x00\x05"),
    "no version": text(NPY_MAGIC),
    "a version that is not known": npy(fields("(1, 3, 3)"), bytes(9), b"\x09\x00"),
    "nine dimensions": npy(fields("(1, 1, 1, 1, 1, 1, 1, 3, 3)"), bytes(9)),
    "another rank": npy(fields("(3, 3)"), bytes(9)),
    "another number of layers": npy(fields("(1, 4, 3)"), bytes(12)),
}  # fmt: skip


@pytest.mark.parametrize("form", NOT_NPY.values(), ids=NOT_NPY)
def test_a_npy_that_is_not_one_is_400_and_nothing_is_allocated_for_it_c4(form: str) -> None:
    """C4: eight of them got a 500, and numpy allocates the size that a header claims."""
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="replay_routed_experts"):
            read_replay(form, 0, SHAPE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < FEW_BYTES


@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(["|u1", "|i1", "<u2", ">u2", "<i4", ">i4", "<u8", "<i8"]),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.sampled_from("CF"),
    st.sampled_from([(1, 0), (2, 0), (3, 0)]),
)
def test_a_npy_is_read_as_numpy_reads_it(descr: str, shape: list[int], order: Any, version: tuple[int, int]) -> None:
    array = np.arange(np.prod(shape), dtype=descr).reshape(shape, order=order)
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    found = decode_npy(file.getvalue())
    assert found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array)


def is_sound(found: ReplayedRoutes) -> bool:
    """Return whether the scheduler can use it: whole rows, experts that exist, and a message that decodes."""
    rows, layers, top_k = found.shape
    ids = np.frombuffer(found.data, "<u2").reshape(found.shape)
    message = TokenizedGenerateReqInput(rid="r", input_ids=[1], sampling_params=SamplingParams(), replay=found)
    fits = (layers, top_k) == (2, 3) and (ids < 8).all() and rows >= 0
    return bool(fits) and not isinstance(read_input(packed(message)), Unreadable)


def check(value: Any) -> None:
    try:
        found = read_replay(value, 0, SHAPE)
    except BadRequest as error:
        assert len(str(error)) < 1000
        return
    assert is_sound(found)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=4),
)


@settings(max_examples=examples(2000, gate=150), deadline=None)
@given(st.sampled_from(["compatible", "compact", "npy"]), st.integers(0, 400), st.binary(max_size=6), st.integers(0, 6))
def test_damaged_bytes_of_any_form_are_400(form: str, at: int, noise: bytes, cut: int) -> None:
    data = base64.b64decode(FORMS[form](routes()))
    at = at % (len(data) + 1)
    check(text(data[:at] + noise + data[at + cut :]))


@settings(max_examples=examples(1000, gate=100), deadline=None)
@given(st.sampled_from(["dict", "packed"]), st.sampled_from(["data", "shape", "dtype", "start", "more"]), ODD)
def test_odd_values_in_an_envelope_are_400(form: str, name: str, value: Any) -> None:
    check(FORMS[form](routes()) | {name: value})


@settings(max_examples=examples(1000, gate=100), deadline=None)
@given(ODD | st.text(alphabet='AaNU=+/{"\x93', max_size=40) | st.dictionaries(st.text(max_size=5), ODD, max_size=4))
def test_anything_at_all_is_400_or_routes(value: Any) -> None:
    check(value)


@settings(max_examples=examples(500, gate=100), deadline=None)
@given(st.text(alphabet="{}()[],:' 0123456789-.eEdscrfotaphTruFl\\\"\n_LxXjJ#|<>", max_size=80))
def test_any_header_is_400_or_an_array(header: str) -> None:
    check(npy(header, bytes(9)))


@pytest.mark.parametrize("form", FORMS)
def test_undamaged_routes_are_read_in_every_form(form: str) -> None:
    found = read_replay(FORMS[form](routes()), 0, SHAPE)
    assert np.array_equal(np.frombuffer(found.data, "<u2").reshape(found.shape), routes().logical_ids_TLK)


def test_a_damaged_record_is_not_repeated_in_the_message() -> None:
    record = RoutedExperts(np.zeros((1, 60_000, 1), np.uint8), 8, tuple(range(60_000)), 60_000)
    with pytest.raises(BadRequest) as caught:
        read_replay(text(encode_compact(record)), 0, SHAPE)
    assert len(str(caught.value)) < 1000


@pytest.mark.mutant
def test_a_reader_that_trusts_headers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "decode_npy", lambda data: np.load(io.BytesIO(data), allow_pickle=False))
    caught = 0
    for form in NOT_NPY.values():
        try:
            read_replay(form, 0, SHAPE)
        except BadRequest:
            caught += 1
        except (MemoryError, OverflowError, RouteFormatError, Exception):
            pass
    assert caught < len(NOT_NPY)
