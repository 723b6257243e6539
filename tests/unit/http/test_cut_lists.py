"""Known lists are cut out of bodies unread, where they are what a reader would find, and nowhere else."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from rollout.core.messages.tensor_lists import encode_lists
from rollout.core.messages.weights import BeginWeightUpdateReqInput, UpdateWeightsFromDistributedReqInput
from rollout.http import decoding, known_lists
from rollout.http.control.body import body_of
from rollout.http.io import parse_body
from rollout.http.known_lists import CutBody, KnownLists
from rollout.http.protocol import Body
from rollout.http.vllm.control_protocol import UpdateWeightsRequest

BUCKET, BEGIN = body_of(UpdateWeightsFromDistributedReqInput), body_of(BeginWeightUpdateReqInput)


def members(first: str, count: int = 40) -> bytes:
    """Return the JSON of lists without the braces around it."""
    names = [first, *(f"model.layers.{number}.weight" for number in range(count - 1))]
    return encode_lists(names, ["bfloat16"] * count, [[2, 3]] * count)[1:-1]


A, B = members("a"), members("b")


def knowing(*lists: bytes) -> KnownLists:
    known = KnownLists()
    for each in lists:
        assert parse_body(BUCKET, b"{%b}" % each, known).lists is not None
    return known


def held(lists: bytes) -> int:
    """Return the bytes that the record holds for these lists: with braces, and without."""
    return 2 * len(lists) + 2


def held_bytes(known: KnownLists) -> int:
    groups = [alike.values() for alike in known._kept.values()]
    assert all(groups), "no beginning is left without lists"
    return sum(len(kept.lists.data) + len(kept.inside) for alike in groups for kept in alike)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the JSON that was decoded to the end."""
    found: list[int] = []
    usual = decoding._without_lists

    def noted(data: Any, place: Any, path: Any, known: Any) -> Any:
        result = usual(data, place, path, known)
        found.append(len(bytes(data)))
        return result

    monkeypatch.setattr(decoding, "_without_lists", noted)
    return found


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (BUCKET, b'{%b,"update_id":"u"}'),
        (BUCKET, b' {"flush_cache":true, %b }'),
        (BEGIN, b'{"manifest":{%b,"fingerprints":"00"},"update_id":"u"}'),
        (UpdateWeightsRequest, None),
    ],
)
def test_known_lists_are_not_read_again(model: type[Body], body: bytes | None, decoded: list[int]) -> None:
    known = knowing(A, B)
    decoded.clear()
    if body is None:  # with lists by other names, which are never cut
        other = A.replace(b'"dtypes"', b'"dtype_names"')
        found = parse_body(model, b'{"update_info":{%b}}' % other, known)
        assert found.lists is not None and found.lists.data == b"{%b}" % A and max(decoded) > len(A)
        return
    found = parse_body(model, body % B, known)
    assert found.lists is not None and found.lists.data == b"{%b}" % B
    assert decoded and max(decoded) < 300 < len(B)


ODD = [
    b"{%b,%b}" % (A, B),
    b"{%b,%b}" % (B, A),
    b'{%b,"names":["c"]}' % A,
    b'{"names":["c"],%b}' % A,
    b'{%b,"n\\u0061mes":["c"]}' % A,
    b'{%b,"boxes":[null]}' % A,
    b'{%b,"boxes":null}' % A,
    b'{"weight_version":{%b},"names":["c"],"dtypes":["x"],"shapes":[[1]]}' % A,
    b'{"unknown":{%b},"names":["c"],"dtypes":["x"],"shapes":[[1]]}' % A,
    b'{"weight_version":"\\%b}' % A,
    b'{"weight_version":"%b"}' % A.replace(b'"', b'\\"'),
    b'{"x\\%b}' % A,
    b"[%b]" % A,
    b"{%b" % A,
    b"{%b}}" % A,
    b"{%b9}" % A,
    b"{,%b}" % A,
    b"%b" % A,
    b'{%b,"group_name":3}' % A,
    b'{"manifest":{%b}}' % A,
    b'{"manifest":{%b},%b}' % (B, A),
    b'{"manifest":[{%b}]}' % A,
    A,
]


def seen(model: type[Body], data: bytes, known: KnownLists | None) -> Any:
    """Return what is read of a body, or its refusal."""
    try:
        body = parse_body(model, data, known)
    except Exception as error:
        return type(error).__name__, str(error)
    return body.model_dump(warnings=False), body.lists, body.unknown


@pytest.mark.parametrize("model", [BUCKET, BEGIN])
@pytest.mark.parametrize("data", ODD)
def test_bodies_are_taken_as_without_the_record(model: type[Body], data: bytes) -> None:
    assert seen(model, data, knowing(A, B)) == seen(model, data, KnownLists())


def test_stand_ins_that_are_not_asked_for_would_be_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut that takes whatever lists it finds would give the bucket lists that another field has."""
    monkeypatch.setattr(CutBody, "read", lambda self, *raw: self._lists)
    wrong = [data for data in ODD if seen(BUCKET, data, knowing(A, B)) != seen(BUCKET, data, KnownLists())]
    assert len(wrong) > 3


def test_the_record_keeps_as_many_bytes_as_it_may() -> None:
    lists = [members(str(number)) for number in range(6)]
    known = KnownLists(max_bytes=3 * held(lists[0]))
    for each in lists:
        parse_body(BUCKET, b"{%b}" % each, known)
    parse_body(BUCKET, b"{%b}" % lists[3], known)
    parse_body(BUCKET, b"{%b}" % members("9"), known)
    kept = [known.cut(b"{%b}" % each) is not None for each in lists]
    assert kept == [False, False, False, True, False, True]
    assert known._num_bytes == held_bytes(known) == 3 * held(lists[0])


def test_lists_that_begin_alike_are_kept_beside_each_other() -> None:
    """A manifest begins as the first bucket of its refresh, and both come again."""
    alike = [A.replace(b"]]", b"],[%d]]" % size) for size in range(known_lists.ALIKE + 1)]
    known = knowing(*alike)
    assert [known.cut(b"{%b}" % each) is not None for each in alike] == [False, True, True, True, True]
    parse_body(BUCKET, b"{%b}" % alike[0], known)
    assert [known.cut(b"{%b}" % each) is not None for each in alike] == [True, False, True, True, True]
    assert known._num_bytes == held_bytes(known)


def test_lists_that_fill_the_record_remove_the_oldest_and_stay() -> None:
    """One of the lists that begin alike goes, not all of them; the oldest beginning goes first."""
    alike = [A.replace(b"]]", b"],[%d]]" % size) for size in range(3)]
    known = KnownLists(max_bytes=3 * held(alike[0]))
    for count, each in enumerate((B, *alike)):
        parse_body(BUCKET, b"{%b}" % each, known)
        assert known.cut(b"{%b}" % each) is not None, count
    assert [known.cut(b"{%b}" % each) is not None for each in (B, *alike)] == [False, True, True, True]
    parse_body(BUCKET, b"{%b}" % B, known)
    assert [known.cut(b"{%b}" % each) is not None for each in (*alike, B)] == [False, True, True, True]
    assert known._num_bytes == held_bytes(known)
    known = KnownLists(max_bytes=held(alike[0]))
    for each in alike:
        parse_body(BUCKET, b"{%b}" % each, known)
        assert known.cut(b"{%b}" % each) is not None and known._num_bytes == held_bytes(known) == held(each)


def test_lists_that_come_again_outlast_others_that_begin_alike() -> None:
    """A manifest comes at each refresh, and a bucket that begins as it does may have other tensors each time."""
    known = knowing(A)
    for size in range(2 * known_lists.ALIKE):
        parse_body(BUCKET, b"{%b}" % A.replace(b"]]", b"],[%d]]" % size), known)
        assert known.cut(b"{%b}" % A) is not None, size


class MeanwhileRead(bytes):
    """A body during whose comparison another thread reads lists that begin alike."""

    known: KnownLists

    def startswith(self, *args: Any) -> bool:
        for size in range(known_lists.ALIKE):
            parse_body(BUCKET, b"{%b}" % A.replace(b"]]", b"],[%d]]" % size), self.known)
        return super().startswith(*args)


def test_lists_that_are_removed_amid_their_comparison_stay_removed() -> None:
    body = MeanwhileRead(b"{%b}" % A)
    body.known = known = knowing(A)
    cut = known.cut(body)
    assert cut is not None and len(cut.data) < 300
    assert known.cut(b"{%b}" % A) is None and known._num_bytes == held_bytes(known)


def test_a_comparison_copies_no_lists() -> None:
    long = members("a", 20_000)
    others = [long.replace(b"]]", b"],[%d]]" % size) for size in range(2)]
    known = knowing(long, others[0])
    for each, is_known in ((long, True), (others[1], False)):
        body = b"{%b}" % each
        tracemalloc.start()
        try:
            assert (known.cut(body) is not None) == is_known
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 100_000 < len(body)


def test_short_lists_are_read_each_time() -> None:
    short = members("a", 2)
    assert len(short) < known_lists._KEY_BYTES and knowing(short).cut(b"{%b}" % short) is None


def test_stand_ins_cannot_be_sent() -> None:
    """Each body has stand-ins of its own."""
    known = knowing(A)
    one, two = known.cut(b"{%b}" % A), known.cut(b"{%b}" % A)
    assert one is not None and two is not None and one.data != two.data
    assert json.loads(one.data).keys() == {"names", "dtypes", "shapes"}
