"""A manifest of lists means what the same manifest of entries does, and is refused with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rollout.control.weight_sources import manifest_of
from rollout.core.messages.tensor_lists import ManifestEntry, ManifestLists, digest_of, encode_lists
from rollout.core.messages.weights import BeginWeightUpdateReqInput
from weight_sync.errors import WeightRequestError
from weight_sync.tensor_meta import TensorMeta

LISTS: dict[str, Any] = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 3], []]}
DIGITS = "00000000000000FFfedcba9876543210"

Form = Callable[[dict[str, Any], str | None], BeginWeightUpdateReqInput]


def entries(lists: dict[str, Any], digits: str | None) -> list[ManifestEntry]:
    rows = zip(lists["names"], lists["dtypes"], lists["shapes"], strict=True)
    stated = [None] * len(lists["names"]) if digits is None else [digits[:16], digits[16:]]
    return [
        ManifestEntry(name=name, dtype=dtype, shape=shape, fingerprint=each)
        for (name, dtype, shape), each in zip(rows, stated)
    ]


def as_entries(lists: dict[str, Any], digits: str | None) -> BeginWeightUpdateReqInput:
    return BeginWeightUpdateReqInput(request_id="r", manifest=entries(lists, digits))


def as_json_entries(lists: dict[str, Any], digits: str | None) -> BeginWeightUpdateReqInput:
    return BeginWeightUpdateReqInput(request_id="r", manifest_entries=msgspec.json.encode(entries(lists, digits)))


def as_lists(lists: dict[str, Any], digits: str | None) -> BeginWeightUpdateReqInput:
    return BeginWeightUpdateReqInput(request_id="r", manifest=ManifestLists(**lists, fingerprints=digits))


def as_json_lists(lists: dict[str, Any], digits: str | None) -> BeginWeightUpdateReqInput:
    data = encode_lists(*lists.values())
    raw: dict[str, Any] = {"manifest_lists": data, "manifest_digest": digest_of(data), "manifest_fingerprints": digits}
    return BeginWeightUpdateReqInput(request_id="r", **raw)


def stated_by(verb: BeginWeightUpdateReqInput) -> list[tuple[TensorMeta, int | None]] | None:
    """Return the tensors of a begin's manifest with their fingerprints, as an update reads them."""
    manifest = manifest_of(verb)
    if manifest is None:
        return None
    metas = manifest.metas()
    values, is_stated = manifest.fingerprints(len(metas))
    return [(meta, value if there else None) for meta, value, there in zip(metas, values.tolist(), is_stated)]


FORMS: list[Form] = [as_entries, as_json_entries, as_lists, as_json_lists]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("digits", [DIGITS, None])
def test_every_form_states_the_same_tensors(form: Form, digits: str | None) -> None:
    found = stated_by(form(LISTS, digits))
    assert found == stated_by(as_entries(LISTS, digits)) and found is not None
    assert [meta.name for meta, _ in found] == ["a", "b"]
    assert [stated for _, stated in found] == ([255, 0xFEDCBA9876543210] if digits else [None, None])


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_manifest_is_one(form: Form) -> None:
    empty: dict[str, Any] = {"names": [], "dtypes": [], "shapes": []}
    assert stated_by(form(empty, None)) == []
    assert stated_by(BeginWeightUpdateReqInput(request_id="r")) is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("change", "digits", "message"),
    [
        ({"dtypes": ["bfloat16", "float31"]}, None, "float31"),
        ({"names": ["a", ""]}, None, "name"),
        ({"shapes": [[2, 3], [2**62, 2**62]]}, None, "2"),
        ({}, "x" * 32, "a fingerprint is 16 hex digits, got 'xxxxxxxxxxxxxxxx'"),
        ({}, "0" * 16 + "é" * 16, "a fingerprint is 16 hex digits"),
    ],
)
def test_every_form_is_refused_with_the_same_words(
    form: Form, change: dict[str, Any], digits: str | None, message: str
) -> None:
    with pytest.raises(WeightRequestError, match=message) as expected:
        stated_by(as_entries(LISTS | change, digits))
    with pytest.raises(WeightRequestError) as found:
        stated_by(form(LISTS | change, digits))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("form", [as_lists, as_json_lists])
@pytest.mark.parametrize(
    ("change", "digits", "message"),
    [
        ({"names": ["a"]}, None, "names, dtypes and shapes must be equally long, got 1, 2 and 2"),
        ({}, "0" * 31, "fingerprints must be 16 hex digits for each of 2 tensors, got 31 characters"),
        ({}, "", "fingerprints must be 16 hex digits for each of 2 tensors, got 0 characters"),
        ({}, "0" * 48, "got 48 characters"),
    ],
)
def test_lists_that_do_not_fit_together_are_refused(
    form: Form, change: dict[str, Any], digits: str | None, message: str
) -> None:
    with pytest.raises(WeightRequestError, match=message):
        stated_by(form(LISTS | change, digits))
