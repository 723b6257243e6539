"""Lists of tensors that were read before are passed on; bodies are taken and refused as if they were read anew."""

from __future__ import annotations

import functools
import json
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from rollout.core.errors import LockstepError
from rollout.core.messages.tensor_lists import decode_lists, digest_of
from rollout.core.messages.weights import BeginWeightUpdateReqInput, UpdateWeightsFromDistributedReqInput
from rollout.http import known_lists
from rollout.http.control.body import body_of
from rollout.http.io import parse_body
from rollout.http.known_lists import KnownLists
from rollout.http.protocol import Body
from rollout.http.vllm.control_protocol import CollectiveRpcRequest, UpdateWeightsRequest
from tests.bodies.mutate import mutated
from tests.http_harness import Live
from weight_sync.errors import WeightRequestError
from weight_sync.tensor_meta import parse_metas

Bodies = Iterable[tuple[type[Body], bytes]]
BUCKET, BEGIN = body_of(UpdateWeightsFromDistributedReqInput), body_of(BeginWeightUpdateReqInput)
LISTS: dict[str, Any] = {"names": ["a", "b"], "dtypes": ["bfloat16", "x"], "shapes": [[2, 3], []]}
VLLM = {"names": ["a", "b"], "dtype_names": ["bfloat16", "x"], "shapes": [[2, 3], []]}
GROUP = {"master_address": "h", "master_port": 5, "rank_offset": 1, "world_size": 2, "group_name": "v"}
ENTRIES = [{"name": "a", "dtype": "x", "shape": [2], "fingerprint": "0" * 16}]
GOOD: list[tuple[type[Body], Any]] = [
    (BUCKET, LISTS | {"group_name": "g", "update_id": "u", "flush_cache": True}),
    (BUCKET, LISTS | {"boxes": [[[0, 1], [2, 3]], None]}),
    (BEGIN, {"manifest": LISTS | {"fingerprints": "0" * 32}, "coverage": "partial"}),
    (BEGIN, {"manifest": ENTRIES, "weight_version": "v"}),
    (UpdateWeightsRequest, {"update_info": VLLM | {"packed": True}}),
    (CollectiveRpcRequest, {"method": "update_weights_nccl", "args": [VLLM, 3]}),
    (CollectiveRpcRequest, {"method": "update_weights_nccl", "args": [VLLM], "kwargs": {"update_info": VLLM}}),
]


def outcome(model: type[Body], data: bytes, known: KnownLists | None) -> Any:
    """Return the values of a body with its lists, or how it was refused."""
    try:
        body = parse_body(model, data, known)
    except LockstepError as error:
        return type(error).__name__, str(error)
    values = plain(body)
    if body.lists is not None:
        assert body.lists.digest == known_lists.digest_of(body.lists.data)
        try:
            put_back(model, values, decode_lists(body.lists.data))
        except msgspec.ValidationError as error:
            return "the engine cannot read it", str(error)
    return values, body.unknown


def plain(value: Any) -> Any:
    if isinstance(value, Body):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return msgspec.to_builtins(value)


def put_back(model: type[Body], values: dict[str, Any], lists: tuple[list[Any], ...]) -> None:
    """Put lists into the emptied places of a body, at the one that counts."""
    for place in model.list_places:
        try:
            holder = values
            for step in place.path:
                holder = holder[step]  # type: ignore[index]
            if all(holder[name] == [] for name in place.names):
                holder |= dict(zip((*place.names, *place.boxes), lists))
                return
        except (LookupError, TypeError):
            continue
    raise AssertionError("no place is empty")


def difference(bodies: Bodies) -> Any:
    """Return the first body that is taken otherwise with a record of what came before than without one."""
    known = KnownLists()
    for model, data in bodies:
        expected = outcome(model, data, None)
        for turn in ("first", "second"):
            if (found := outcome(model, data, known)) != expected:
                return turn, model.__name__, data[:300], found, expected
    return None


@pytest.fixture(params=["read", "compared"])
def write(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Return a function that writes JSON: with spaces, or without, so that lists which come again are cut out."""
    if request.param == "read":
        return json.dumps
    monkeypatch.setattr(known_lists, "_KEY_BYTES", 8)  # all lists have the same beginning
    return functools.partial(json.dumps, separators=(",", ":"))


def test_each_form_of_lists_is_taken_from_its_place(write: Callable[[Any], str]) -> None:
    assert difference((model, write(body).encode()) for model, body in GOOD) is None
    for number, (model, body) in enumerate(GOOD):
        found = parse_body(model, write(body).encode(), KnownLists())
        assert (found.lists is None) == (number == 3), body
        assert found.lists is None or found.lists.num_names == 2


@pytest.mark.parametrize("seed", range(8))
def test_mutated_bodies_are_taken_and_refused_as_before(seed: int, write: Callable[[Any], str]) -> None:
    rng = random.Random(seed)

    def bodies() -> Bodies:
        for _ in range(500):
            model, body = rng.choice(GOOD)
            data = write(mutated(rng, body, [*LISTS, "boxes", "manifest", "update_info", "args", "kwargs"]))
            yield model, data.encode("utf-8", "surrogatepass")

    assert difference(bodies()) is None


@pytest.mark.parametrize("seed", range(8))
def test_damaged_bytes_are_taken_and_refused_as_before(seed: int, write: Callable[[Any], str]) -> None:
    rng = random.Random(seed)

    def bodies() -> Bodies:
        for _ in range(500):
            model, body = rng.choice(GOOD)
            data = bytearray(write(body).encode())
            if rng.random() < 0.5:
                yield model, bytes(data)  # so that its lists are known, damaged or around the damage
            at = rng.randrange(len(data))
            data[at : at + rng.choice([0, 1, 1, 1, 5])] = rng.choice([b"", b" ", b'"', b"[", b"9", b"\xff", b"\\ud8"])
            yield model, bytes(data)

    assert difference(bodies()) is None


HOSTILE: list[Any] = [
    {"names": None},
    {"names": "a"},
    {"names": [1]},
    {"names": ["a", None]},
    {"names": {"a": 1}},
    {"dtypes": [["x"]]},
    {"shapes": [[-1]]},
    {"shapes": [[2**63]]},
    {"shapes": [[2**70]]},
    {"shapes": [["2", 3.0, True]]},
    {"shapes": [2]},
    {"shapes": [[1.5]]},
    {"shapes": [[[1]]]},
    {"boxes": None},
    {"boxes": []},
    {"boxes": [None]},
    {"boxes": [[[0, 1], [2, 3]], [[0, 1, 2]]]},
    {"boxes": [[[0, -1], [2, 3]], []]},
    {"boxes": [[["0", 1.0], [2, 2**70]], []]},
    {"boxes": [[0, 1], [[[0]]]]},
    {"boxes": "null"},
    {"names": []},
    {"names": [], "dtypes": [], "shapes": []},
    {"names": ["a"] * 5000},
    {"names": ["\x00", "é😀"]},
    {"names": ["a" * 100_000]},
]


@pytest.mark.parametrize("change", HOSTILE)
def test_hostile_lists_are_taken_and_refused_as_before(change: Any, write: Callable[[Any], str]) -> None:
    renamed = {("dtype_names" if name == "dtypes" else name): value for name, value in change.items()}
    bodies = [
        (BUCKET, LISTS | change),
        (BEGIN, {"manifest": LISTS | change}),
        (UpdateWeightsRequest, {"update_info": VLLM | renamed}),
        (CollectiveRpcRequest, {"method": "m", "kwargs": {"update_info": VLLM | renamed}, "args": [VLLM]}),
    ]
    assert difference((model, write(body).encode()) for model, body in bodies) is None


def test_huge_lists_are_refused_as_before() -> None:
    many = LISTS | {"names": [""] * ((1 << 20) + 1)}
    known = KnownLists()
    refused = outcome(BUCKET, json.dumps(many).encode(), known)
    assert refused == ("TooLarge", "the body has over 1048576 strings, arrays and objects") and len(known) == 0


# --- what is known -----------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lists whose elements were looked at, in JSON."""
    found: list[bytes] = []
    usual = known_lists.pieces_of

    def noted(data: Any, kind: Any) -> Any:
        found.append(bytes(data))
        return usual(data, kind)

    monkeypatch.setattr(known_lists, "pieces_of", noted)
    return found


def taken(known: KnownLists, data: bytes) -> tuple[bytes, Any]:
    """Return the digest and the body of a bucket that must be taken."""
    body = parse_body(BUCKET, data, known)
    assert body.lists is not None
    return body.lists.digest, body


def test_lists_are_read_once_whatever_stands_around_them(reads: list[bytes]) -> None:
    known = KnownLists()
    first, _ = taken(known, json.dumps(LISTS | {"group_name": "g"}).encode())
    assert len(reads) == 3
    turned = dict(reversed(LISTS.items()))
    for around in ({"group_name": "h", "update_id": "u"}, {"weight_version": "é", "unknown": {"names": [1]}}):
        digest, body = taken(known, json.dumps(around | turned).encode())
        assert digest == first and body.group_name == around.get("group_name", "weight_update_group")
    info = json.dumps({"manifest": LISTS}).encode()
    assert parse_body(BEGIN, info, known).lists.digest == first  # type: ignore[union-attr]
    assert len(reads) == 3, "the fields around the lists, and their order, change nothing"


@pytest.mark.parametrize(
    "other",
    [
        b'{"names":["a", "b"],"dtypes":["x","y"],"shapes":[[2],[]]}',
        b'{"names":["\\u0061","b"],"dtypes":["x","y"],"shapes":[[2],[]]}',
        b'{"names":["a","b"],"dtypes":["x","y"],"shapes":[[2 ],[]]}',
    ],
    ids=["a space in a list", "an escape in a name", "a space in a shape"],
)
def test_other_bytes_of_the_same_lists_are_read_anew(reads: list[bytes], other: bytes) -> None:
    known = KnownLists()
    first, _ = taken(known, b'{"names":["a","b"],"dtypes":["x","y"],"shapes":[[2],[]]}')
    digest, body = taken(known, other)
    assert digest != first and decode_lists(body.lists.data) == (["a", "b"], ["x", "y"], [[2], []], None)
    assert len(reads) == 6 and len(known) == 2
    spaced = b' {"names":["a","b"] ,  "dtypes" : ["x","y"],\n"shapes":[[2],[]]} '
    assert taken(known, spaced)[0] == first and len(reads) == 6, "white space around the lists is none of them"


def test_the_last_of_two_keys_counts_as_in_any_body() -> None:
    known = KnownLists()
    one, two = json.dumps(["a", "b"]).encode(), json.dumps(["c", "d"]).encode()
    rest = b'"dtypes":["x","y"],"shapes":[[2],[]]'
    twice = b'{"names":%b,%b,"names":%b,"n\\u0061mes":%b}'
    for names in (one, two):
        taken(known, b'{"names":%b,%b}' % (names, rest))
    _, body = taken(known, twice % (one, rest, b"[]", two))
    assert decode_lists(body.lists.data)[0] == ["c", "d"]
    _, body = taken(known, twice % (two, rest, b"[]", one))
    assert decode_lists(body.lists.data)[0] == ["a", "b"]
    data = twice % (one, rest, two, b"[3]")
    assert outcome(BUCKET, data, known) == outcome(BUCKET, data, None) and len(known) == 2


def test_lists_of_unequal_length_are_refused_by_the_engine_each_time(reads: list[bytes]) -> None:
    known = KnownLists()
    for _ in range(2):
        _, body = taken(known, json.dumps(LISTS | {"names": ["a"]}).encode())
        with pytest.raises(WeightRequestError, match="must be equally long, got 1, 2 and 2"):
            parse_metas(*decode_lists(body.lists.data))
    assert len(reads) == 3


def test_the_record_is_bounded_and_keeps_what_came_last(reads: list[bytes]) -> None:
    known = KnownLists(limit=3)
    for number in (0, 1, 2, 0, 3):
        taken(known, json.dumps(LISTS | {"names": [str(number)]}).encode())
    assert len(known) == 3 and len(reads) == 12
    for number, reads_of_it in ((0, 0), (2, 0), (3, 0), (1, 3)):
        reads.clear()
        taken(known, json.dumps(LISTS | {"names": [str(number)]}).encode())
        assert len(reads) == reads_of_it, number


def test_threads_share_a_record() -> None:
    known = KnownLists(limit=4)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(500):
            names = [str(rng.randrange(8))]
            _, body = taken(known, json.dumps(LISTS | {"names": names}).encode())
            if decode_lists(body.lists.data)[0] != names:
                wrong.append(names)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and len(known) == 4


def test_every_dialect_sends_the_lists_as_they_came_under_one_digest(live: Live) -> None:
    verb = UpdateWeightsFromDistributedReqInput
    live.scheduler.received.clear()
    calls: list[tuple[str, Any]] = [
        ("/init_weight_transfer_engine", {"init_info": GROUP}),
        *[("/update_weights_from_distributed", LISTS | {"group_name": group}) for group in "gh"],
        ("/areal_set_update_weight_meta", LISTS | {"group_name": "g"}),
        ("/areal_update_weights_xccl", {}),
        ("/update_weights", {"update_info": VLLM}),
        ("/collective_rpc", {"method": "update_weights_nccl", "args": [VLLM]}),
        ("/collective_rpc", {"method": "update_weights_nccl", "kwargs": {"update_info": VLLM}}),
        ("/begin_weight_update", {"manifest": LISTS | {"fingerprints": "0" * 32}}),
    ]
    for path, body in calls:
        reply = live.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert "announced" not in reply.text or "2 tensors announced." in reply.text
    sent = live.sent(verb)
    assert [message.group_name for message in sent] == ["g", "h", "g", "v", "v", "v"]
    (begin,) = live.sent(BeginWeightUpdateReqInput)
    assert begin.manifest is None and begin.fingerprints() == "0" * 32
    for message in (*sent, begin):
        assert message.lists() == (*LISTS.values(), None) and message.digest() == begin.manifest_digest
    assert all(message.tensor_lists and not message.names for message in sent)


def test_other_boxes_of_the_same_names_have_another_digest() -> None:
    known = KnownLists()
    digests = [taken(known, json.dumps(LISTS).encode())[0]]
    for boxes in ([[[0, 1], [0, 3]], None], [[[1, 2], [0, 3]], None], [None, None]):
        digest, body = taken(known, json.dumps(LISTS | {"boxes": boxes}).encode())
        assert body.boxes is None and decode_lists(body.lists.data) == (*LISTS.values(), boxes)
        digests.append(digest)
    assert len(set(digests)) == 4
    assert taken(known, json.dumps(LISTS | {"boxes": None}).encode())[0] == digests[0]


def test_no_client_can_name_the_digest(live: Live) -> None:
    """The digest stands for the lists in the engine, so that it must be of their bytes."""
    live.scheduler.received.clear()
    false = {"tensor_lists": "{}", "lists_digest": "x", "manifest_digest": "x", "manifest_lists": "{}"}
    reply = live.client.post("/update_weights_from_distributed", json=LISTS | false)
    assert reply.status_code == 200 and set(reply.json()["ignored_fields"]) == set(false)
    (message,) = live.sent(UpdateWeightsFromDistributedReqInput)
    assert message.digest() == digest_of(message.tensor_lists) and message.lists() == (*LISTS.values(), None)


# --- wrong variants ----------------------------------------------------------------------------------------------


def by_length(data: bytes) -> bytes:
    return len(data).to_bytes(32, "little")


def by_names(data: bytes) -> bytes:
    return digest_of(bytes(msgspec.json.decode(data, type=dict[str, msgspec.Raw])["names"]))


def by_beginning(data: bytes) -> bytes:
    return digest_of(data[:40])


@pytest.mark.parametrize("variant", [by_length, by_names, by_beginning])
def test_a_record_of_another_key_is_noticed(monkeypatch: pytest.MonkeyPatch, variant: Callable[[bytes], bytes]) -> None:
    bodies = [
        (BUCKET, b'{"names":["aa","bb"],"dtypes":["x","y"],"shapes":[[2],[34]]}'),
        (BUCKET, b'{"names":["aa",1234],"dtypes":["x","y"],"shapes":[[2],[34]]}'),
        (BUCKET, b'{"names":["aa","bb"],"dtypes":["x","y"],"shapes":[[2],[-3]]}'),
        (BUCKET, b'{"names":["aa","bb"],"dtypes":["x","y"],"shapes":[[2],[-3],[1]]}'),
    ]
    assert difference(bodies) is None
    monkeypatch.setattr(known_lists, "digest_of", variant)
    assert difference(bodies) is not None
