"""Log-probabilities in the compact form are read back as written; damage is refused, wrong readers are noticed."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capture import token_logprobs
from capture.errors import CaptureError, LogprobFormatError, LogprobValueError
from capture.token_logprobs import TokenLogprobs, token_id_dtype
from tests.tiers import examples

thorough = settings(deadline=None, max_examples=examples(150))
HEADER = 48


@st.composite
def records(draw: Any) -> TokenLogprobs:
    count, num_top, num_chosen = draw(st.integers(0, 6)), draw(st.integers(0, 5)), draw(st.integers(0, 3))
    vocab_size = draw(st.sampled_from([1, 300, 65536, 65537, 2**31 - 1]))
    floats = draw(st.sampled_from([np.uint32, np.uint64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def logprobs(*shape: int) -> np.ndarray:  # any bits at all: NaN of every kind, infinities, -0
        bits = rng.integers(0, np.iinfo(floats).max, shape, dtype=floats, endpoint=True)
        return bits.view(np.float32 if floats is np.uint32 else np.float64)

    def ids(*shape: int) -> np.ndarray:
        return rng.integers(0, vocab_size, shape).astype(token_id_dtype(vocab_size))

    return TokenLogprobs(
        ids(count),
        logprobs(count),
        ids(count, num_top),
        logprobs(count, num_top),
        ids(num_chosen),
        logprobs(count, num_chosen),
        vocab_size,
        draw(st.integers(0, 10**9)),
    )


def facts(record: TokenLogprobs) -> list[Any]:
    """Return every bit of the record, in a form that `==` compares."""
    values = [getattr(record, each.name) for each in dataclasses.fields(record)]
    return [(x.dtype.str, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else x for x in values]


def an_example(count: int = 3) -> TokenLogprobs:
    return TokenLogprobs(
        np.arange(count, dtype=np.uint16),
        np.linspace(-1, -2, count, dtype=np.float32),
        np.arange(2 * count, dtype=np.uint16).reshape(count, 2),
        np.linspace(-3, -4, 2 * count, dtype=np.float32).reshape(count, 2),
        np.array([7], dtype=np.uint16),
        np.full((count, 1), -5, dtype=np.float32),
        300,
        11,
    )


@thorough
@given(record=records())
def test_what_is_written_is_read_back(record: TokenLogprobs) -> None:
    assert facts(TokenLogprobs.decode(record.encode())) == facts(record)
    assert facts(TokenLogprobs.decode_text(record.encode_text())) == facts(record)
    assert record.encode_text() == base64.b64encode(record.encode()).decode()


def test_the_layout_byte_for_byte() -> None:
    record = an_example(1)
    data = record.encode()
    assert data[:8] == b"LSLP" + bytes([1, 0, 4, 2])
    numbers = [(8, 16, 1), (16, 20, 2), (20, 24, 1), (24, 32, 11), (32, 36, 300), (40, 48, 0)]
    assert [int.from_bytes(data[a:b], "little") for a, b, _ in numbers] == [value for _, _, value in numbers]
    without = data[:36] + bytes(4) + data[40:]
    assert int.from_bytes(data[36:40], "little") == zlib.crc32(without)
    floats = np.array([-1, -3, -4, -5], dtype="<f4").tobytes()
    assert data[HEADER:] == floats + np.array([0, 0, 1, 7], dtype="<u2").tobytes()


def test_a_long_text_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    record = an_example(50)
    for size in (3, 48, 300):
        monkeypatch.setattr(token_logprobs, "_B64_BYTES", size)
        assert record.encode_text() == base64.b64encode(record.encode()).decode()
    monkeypatch.setattr(token_logprobs, "_B64_BYTES", 4)  # padding in the middle: the reader refuses it
    with pytest.raises(LogprobFormatError):
        TokenLogprobs.decode_text(record.encode_text())


# --- damage ------------------------------------------------------------------------------------------------------


def survives(data: bytes) -> TokenLogprobs | None:
    """Return the record that is read, or None if one of the two errors refuses it; other errors fail the test."""
    try:
        return TokenLogprobs.decode(data)
    except (LogprobFormatError, LogprobValueError) as error:
        assert 0 < len(str(error)) < 300
        return None


@thorough
@given(record=records(), data=st.data())
def test_a_changed_cut_or_extended_record_is_refused(record: TokenLogprobs, data: st.DataObject) -> None:
    content = bytearray(record.encode())
    index = data.draw(st.integers(0, len(content) - 1))
    content[index] ^= data.draw(st.integers(1, 255))
    assert survives(bytes(content)) is None
    assert survives(record.encode()[: data.draw(st.integers(0, len(content) - 1))]) is None
    assert survives(record.encode() + bytes(data.draw(st.integers(1, 9)))) is None


@settings(deadline=None, max_examples=examples(400))
@given(data=st.binary(max_size=200), start=st.sampled_from([b"", b"LSLP", b"LSLP\x01\x00\x04\x02"]))
@example(data=bytes(40), start=b"LSLP\x01\x00\x04\x02")
@example(data=b"\xff" * 40, start=b"LSLP\x01\x00\x04\x02")
def test_any_bytes_are_refused_or_read(data: bytes, start: bytes) -> None:
    """Some bytes have a checksum that fits, so that the rest is read."""
    survives(start + data)
    if len(start + data) >= HEADER:
        content = bytearray(start + data)
        content[36:40] = bytes(4)
        content[36:40] = zlib.crc32(content).to_bytes(4, "little")
        survives(bytes(content))


@pytest.mark.parametrize("text", [None, 7, "%%%", "", "AAAA", ["AAAA"], {"a": 1}, "é" * 100, b"\xff" * 80])
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(LogprobFormatError):
        TokenLogprobs.decode_text(text)


def test_a_reader_without_the_checks_would_not_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    content = bytearray(an_example().encode())
    content[HEADER] ^= 1
    monkeypatch.setattr(token_logprobs, "_checksum", lambda data: int.from_bytes(data[36:40], "little"))
    assert survives(bytes(content)) is not None


CHANGES: dict[str, Callable[[TokenLogprobs], dict[str, Any]]] = {
    "a token outside the vocabulary": lambda r: {"token_ids": np.full_like(r.token_ids, 300)},
    "a likely one outside": lambda r: {"top_ids": np.full_like(r.top_ids, 300)},
    "a negative one": lambda r: {"vocab_size": 70_000, "token_ids": np.full(3, -1, dtype=np.int32)},
    "ids that are too wide": lambda r: {"token_ids": r.token_ids.astype(np.int32)},
    "ids that are too narrow": lambda r: {"vocab_size": 70_000},
    "one token fewer": lambda r: {"token_ids": r.token_ids[1:]},
    "likely ones of fewer tokens": lambda r: {"top_logprobs": r.top_logprobs[1:]},
    "fewer likely ids": lambda r: {"top_ids": r.top_ids[:, 1:]},
    "no axis of likely ids": lambda r: {"top_ids": r.top_ids[0]},
    "another dtype": lambda r: {"top_logprobs": r.top_logprobs.astype(np.float64)},
    "half precision": lambda r: {"logprobs": r.logprobs.astype(np.float16)},
    "no vocabulary": lambda r: {"vocab_size": 0},
    "a negative start": lambda r: {"start": -1},
}


@pytest.mark.parametrize("change", CHANGES)
def test_arrays_that_do_not_fit_are_refused(change: str) -> None:
    with pytest.raises(LogprobValueError):
        dataclasses.replace(an_example(), **CHANGES[change](an_example()))


def test_a_record_is_of_its_tokens() -> None:
    record = an_example()
    record.require([0, 1, 2], 11)
    for ids, start in (([0, 1, 2], 10), ([0, 1], 11), ([0, 1, 3], 11), ([0, 1, 2, 3], 11)):
        with pytest.raises(CaptureError, match=f"do not match the {len(ids)} tokens from position {start}"):
            record.require(ids, start)
