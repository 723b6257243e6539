"""The digest by a kept text of lines is `fingerprint.digest`, whatever the names and the fingerprints are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.digest_plan import DigestPlan, hex_digits, split_digits
from weight_sync.fingerprint import digest, fingerprint_hex
from weight_sync.tensor_meta import DTYPES, TensorMeta

names = st.text(st.sampled_from("ab.\0\x01é中") | st.characters(codec="utf-8"), min_size=1, max_size=6)
metas = st.builds(
    TensorMeta, names, st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 30), max_size=3).map(tuple)
)
values = st.sampled_from([0, 1, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1)


@given(st.lists(metas, max_size=8, unique_by=lambda meta: meta.name), st.data())
def test_a_digest_by_a_plan_is_the_digest(tensors: list[TensorMeta], data: st.DataObject) -> None:
    plan = DigestPlan(tensors)
    for _ in range(2):
        found = [data.draw(values) for _ in tensors]
        assert plan.digest(np.array(found, np.uint64)) == digest(zip(tensors, found, strict=True))


def test_lines_that_only_a_fingerprint_would_sort_are_sorted_each_time() -> None:
    """A name may go on where another line has its fingerprint: which comes first then changes with that."""
    first = TensorMeta("a", DTYPES["int8"], (2,))
    second = TensorMeta("a\0int8\x002\x008", DTYPES["int8"], ())
    plan = DigestPlan([first, second])
    for value in (0x7 << 60, 0x9 << 60):
        assert plan.digest(np.array([value, 0], np.uint64)) == digest([(first, value), (second, 0)])


@given(st.lists(values, max_size=5))
def test_hex_digits_are_those_of_each_fingerprint_end_to_end(found: list[int]) -> None:
    digits = hex_digits(np.array(found, np.uint64))
    assert split_digits(digits) == [fingerprint_hex(value) for value in found]
