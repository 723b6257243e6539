"""Lists of tensors in messages: the same as lists and as JSON, and one digest for the same bytes only."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import msgspec
import pytest

from rollout.core.messages.io_struct import decode_input, encode
from rollout.core.messages.tensor_lists import ManifestLists, decode_lists, digest_of, encode_lists, joined_lists
from rollout.core.messages.weights import BeginWeightUpdateReqInput, UpdateWeightsFromDistributedReqInput
from weight_sync.json_lists import JsonList

LISTS = (["a", 'b "\\ü'], ["bfloat16", "float32"], [[2, 3], []])
EMPTY: dict[str, Any] = {"names": [], "dtypes": [], "shapes": []}


def bucket(**fields: Any) -> UpdateWeightsFromDistributedReqInput:
    return UpdateWeightsFromDistributedReqInput(request_id="r", **fields)


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
def test_long_lists_come_back_as_they_were(count: int) -> None:
    lists = ([f"w{n}" for n in range(count)], ["x"] * count, [[n, 2**62] for n in range(count)])
    assert decode_lists(encode_lists(*lists)) == (*lists, None)
    boxes = [None if n % 3 else [[n, n + 1], [0, 2**62]] for n in range(count)]
    assert decode_lists(encode_lists(*lists, boxes)) == (*lists, boxes)


def test_a_bucket_has_the_same_lists_and_digest_in_both_forms() -> None:
    plain = bucket(**dict(zip(EMPTY, LISTS)))
    data = encode_lists(*LISTS)
    assert json.loads(data) == dict(zip(EMPTY, LISTS))
    for form in (bucket(tensor_lists=data, **EMPTY), bucket(tensor_lists=data, lists_digest=digest_of(data), **EMPTY)):
        sent: Any = decode_input(encode(form))
        assert sent.lists() == plain.lists() == (*LISTS, None)
        assert sent.digest() == plain.digest() == digest_of(data)
    assert bucket(**EMPTY).digest() != plain.digest()


def test_boxes_are_in_the_digest_of_a_bucket() -> None:
    """Calls of one digest share a plan: other boxes of the same names must have another."""
    lists = dict(zip(EMPTY, LISTS))
    digests = [bucket(**lists).digest()]
    for boxes in ([[[0, 1], [0, 3]], None], [[[1, 2], [0, 3]], None]):
        plain = bucket(**lists, boxes=boxes)
        data = encode_lists(*LISTS, boxes)
        raw: Any = decode_input(encode(bucket(tensor_lists=data, **EMPTY)))
        assert raw.lists() == plain.lists() == (*LISTS, boxes)
        assert raw.digest() == plain.digest() == digest_of(data)
        digests.append(plain.digest())
    assert len(set(digests)) == 3


def test_a_manifest_has_the_same_lists_and_digest_in_both_forms() -> None:
    names, dtypes, shapes = LISTS
    stated = ManifestLists(names=names, dtypes=dtypes, shapes=shapes, fingerprints="0" * 32)
    plain = BeginWeightUpdateReqInput(request_id="r", manifest=stated)
    data = encode_lists(*LISTS)
    raw = BeginWeightUpdateReqInput(request_id="r", manifest_lists=data, manifest_fingerprints="0" * 32)
    for form in (plain, raw):
        sent: Any = decode_input(encode(form))
        assert sent.has_manifest and sent.lists() == (*LISTS, None) and sent.fingerprints() == "0" * 32
        assert sent.digest() == digest_of(data) and not list(sent.entries())
    none = BeginWeightUpdateReqInput(request_id="r")
    assert not none.has_manifest and none.lists() is none.digest() is none.fingerprints() is None


def test_each_part_of_the_lists_is_in_the_digest() -> None:
    """Three lists of one joined text would be other lists if their bounds were not in it."""
    texts = [(b'["a"]', b'["b"]', b"[[1]]"), (b'["a"]', b'["b"]', b"[[1] ]"), (b'["b"]', b'["a"]', b"[[1]]")]
    assert len({digest_of(joined_lists(*each)) for each in texts}) == 3


def test_a_json_list_keeps_its_json_and_does_not_change() -> None:
    shapes = JsonList([[2, 3], [], (4,)])
    assert shapes.json == b"[[2,3],[],[4]]" and shapes.json is shapes.json
    assert shapes == [[2, 3], [], (4,)] and isinstance(shapes, list)
    assert JsonList(["ü"]).json == b'["\\u00fc"]'
    for change in (
        lambda: shapes.append(1),
        lambda: shapes.__setitem__(0, 1),
        lambda: shapes.__iadd__([1]),
        lambda: shapes.sort(),
        lambda: shapes.__delitem__(0),
    ):
        with pytest.raises(TypeError, match="does not change"):
            change()
    assert msgspec.json.decode(shapes.json) == [[2, 3], [], [4]]


def test_a_json_list_can_be_copied_and_sent_to_another_process() -> None:
    names = JsonList(["a", "b"])
    for same in (copy.copy(names), copy.deepcopy(names), pickle.loads(pickle.dumps(names))):  # noqa: S301
        assert type(same) is JsonList and same == names and same.json == names.json
