"""Bodies of verbs that hold many small objects: decoded as the structs of the message, with the same result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rollout.core.errors import BadRequest
from rollout.core.messages.tensor_lists import ManifestEntry
from rollout.core.messages.weights import BeginWeightUpdateReqInput
from rollout.http.control.body import body_of, fields_of
from rollout.http.io import parse_body, validated

VERB = BeginWeightUpdateReqInput
ENTRY = {"name": "a", "dtype": "bfloat16", "shape": [2, 3], "fingerprint": "00000000000000ff"}


def fields(body: Any) -> dict[str, Any]:
    """Return the fields that the verb gets."""
    return fields_of(VERB, parse_body(body_of(VERB), json.dumps(body).encode()))


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        [],
        [ENTRY],
        [ENTRY, ENTRY],
        [ENTRY, {**ENTRY, "fingerprint": None}],
        [{"name": "a", "dtype": "x", "shape": []}],
        [{**ENTRY, "added_later": 1}],
        [ENTRY, {**ENTRY, "shape": ["2", 3.0]}],
        [{**ENTRY, "shape": [2**63 - 1, 0]}],
    ],
)
def test_the_verb_gets_what_validation_gives(manifest: Any) -> None:
    body = {"update_id": "u", "coverage": "partial", "manifest": manifest, "lease_s": 3, "unknown": [1]}
    found = fields(body)
    assert found == fields_of(VERB, validated(body_of(VERB), body))
    assert found["update_id"] == "u" and found["lease_s"] == 3.0
    assert manifest is None or [type(entry) for entry in found["manifest"]] == [ManifestEntry] * len(manifest)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**ENTRY, "shape": [-1]}, "manifest.1.shape"),
        ({**ENTRY, "shape": [2**63]}, "manifest.1.shape"),
        ({**ENTRY, "shape": [2**70]}, "manifest.1.shape"),
        ({**ENTRY, "shape": [1.5]}, "manifest.1.shape"),
        ({**ENTRY, "shape": [None]}, "manifest.1.shape"),
        ({**ENTRY, "shape": None}, "manifest.1.shape"),
        ({**ENTRY, "name": 3}, "manifest.1.name"),
        ({"name": "a", "dtype": "x"}, "manifest.1.shape"),
        ([], "manifest.1"),
        (None, "manifest.1"),
    ],
)
def test_an_entry_that_does_not_fit_is_named(entry: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        fields({"manifest": [ENTRY, entry, ENTRY]})


@pytest.mark.parametrize("data", [b"[]", b"3", b"null", b'"text"', b'[{"manifest": []}]', b"{", b'{"manifest": [}'])
def test_what_is_no_object_is_refused_as_any_body(data: bytes) -> None:
    with pytest.raises(BadRequest, match=r"must be a JSON object|not valid JSON"):
        parse_body(body_of(VERB), data)


def calls_of_python(call: Callable[[], object]) -> int:
    """Return how many functions begin and end while `call` runs: a count, which another load does not change."""
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


def is_read_at_once(read: Callable[[bytes], object]) -> bool:
    """Return whether `read` calls few functions for every entry of a manifest.

    An entry that becomes a struct takes two; one that is validated by itself takes more than fifty.
    """
    entry = {"name": "model.layers.60.mlp.experts.127.gate_proj.weight", "dtype": "bfloat16", "shape": [768, 2048]}
    small, large = (json.dumps({"manifest": [entry] * count}).encode() for count in (10, 1_010))
    read(small)  # builds the model
    return calls_of_python(lambda: read(large)) - calls_of_python(lambda: read(small)) < 10 * 1_000


def test_a_manifest_of_a_large_model_is_read_at_once() -> None:
    """D1: its entries were validated one by one, where requests are answered."""
    assert is_read_at_once(lambda data: parse_body(body_of(VERB), data))


@pytest.mark.mutant
def test_entries_that_are_validated_one_by_one_are_noticed() -> None:
    assert not is_read_at_once(lambda data: validated(body_of(VERB), json.loads(data)))


def test_entries_are_not_made_a_second_time() -> None:
    """D1: they were turned into fields one by one, after they were read."""
    body = parse_body(body_of(VERB), json.dumps({"manifest": [ENTRY] * 2_000}).encode())
    found = fields_of(VERB, body)
    assert len(found["manifest"]) == 2_000
    assert all(entry is read for entry, read in zip(found["manifest"], body.manifest, strict=True))


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
def test_a_manifest_in_json_is_the_same(count: int) -> None:
    manifest = [ManifestEntry(name=f"w{number}", dtype="bfloat16", shape=[number]) for number in range(count)]
    whole = VERB(request_id="r", manifest=manifest)
    json_form = VERB(request_id="r", manifest_entries=msgspec.json.encode(manifest))
    assert list(json_form.entries()) == list(whole.entries()) == manifest
    assert json_form.has_manifest and whole.has_manifest and not VERB(request_id="r").has_manifest
    decoded = fields({"manifest": [{"name": entry.name, "dtype": "x", "shape": entry.shape} for entry in manifest]})
    assert [entry.name for entry in decoded["manifest"]] == [entry.name for entry in manifest]
