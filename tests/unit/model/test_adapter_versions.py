"""Versions of adapters: who gets a slot, which versions stay, and refusals that change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rollout.adapters.peft_folder import Adapter, LoraWeights
from rollout.core.adapter_names import adapter_ref, fault_of_name
from rollout.core.errors import AdapterError, Conflict, NotFound
from rollout.distributed.communicator import Communicator
from rollout.layers.lora import SlotSizes
from rollout.model.adapters import AdapterTable, ServedAdapter
from rollout.model.decoder import DecoderForCausalLM
from tests.model_zoo import load_tiny, tiny_checkpoint

O = "model.layers.0.self_attn.o_proj"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderForCausalLM:
    return load_tiny(tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def slots_of_one_test(model: DecoderForCausalLM) -> None:
    for _, layer in model.named_layers():
        layer.__dict__.pop("lora", None)


def content(model: DecoderForCausalLM, value: float, *names: str) -> Adapter:
    modules = {}
    for name in names or (O,):
        out, into = model.weights.metas()[f"{name}.weight"].shape
        modules[name] = LoraWeights(torch.full((2, into), value), torch.full((out, 2), value), 1.0)
    return Adapter(modules, f"digest of {value}")


def versions(table: AdapterTable) -> list[str]:
    return [f"{label.name}@{label.version}" for label in table.labels]


def test_a_load_is_the_next_version_of_its_name(model: DecoderForCausalLM) -> None:
    table = AdapterTable(model, SlotSizes(4, 2))
    loads = [table.load(name, content(model, value)) for name, value in (("poet", 1), ("clerk", 2), ("poet", 3))]
    assert [(each.label.name, each.label.version, each.slot) for each in loads] == [
        ("poet", 0, 0),
        ("clerk", 0, 1),
        ("poet", 1, 2),
    ]
    assert table.find("poet") == loads[2] == table.find("poet@1")
    assert table.find("poet@0") == loads[0], "an older version stays until a load needs its slot"


def test_the_oldest_version_that_nothing_needs_is_evicted(model: DecoderForCausalLM) -> None:
    table = AdapterTable(model, SlotSizes(4, 2))
    held: list[ServedAdapter | None] = [None, table.load("poet", content(model, 0))]
    table.connect(lambda: held, lambda _: None)
    table.load("poet", content(model, 1), pinned=True)
    table.load("poet", content(model, 2))
    table.load("poet", content(model, 3))
    table.load("clerk", content(model, 4))
    assert versions(table) == ["poet@0", "poet@1", "poet@3", "clerk@0"]
    with pytest.raises(NotFound, match=r"no version 2 of the adapter 'poet'; this server has 0, 1, 3$"):
        table.find("poet@2")
    held.clear()
    table.load("monk", content(model, 5))
    assert versions(table) == ["poet@1", "poet@3", "clerk@0", "monk@0"]


def test_a_refused_load_says_what_holds_each_slot(model: DecoderForCausalLM) -> None:
    """A version in use is never evicted, whatever its age; vLLM drops the oldest that requests still name."""
    table = AdapterTable(model, SlotSizes(3, 2))
    held = [table.load("poet", content(model, 0))]
    table.connect(lambda: held, lambda _: None)
    table.load("poet", content(model, 1))
    table.load("clerk", content(model, 2), pinned=True)
    told = r"all 3 slots are taken .*: poet@0 \(in use\); poet@1 \(newest\); clerk@0 \(newest, pinned\)$"
    before = versions(table)
    with pytest.raises(AdapterError, match=told):
        table.load("monk", content(model, 3))
    assert versions(table) == before and table.find("poet@0") == held[0]


def test_one_slot_takes_version_after_version(model: DecoderForCausalLM) -> None:
    table = AdapterTable(model, SlotSizes(1, 2))
    for count in range(3):
        assert table.load("poet", content(model, count)).label.version == count
    held = [table.find("poet")]
    table.connect(lambda: held, lambda _: None)
    with pytest.raises(AdapterError, match=r"poet@2 \(newest, in use\)$"):
        table.load("poet", content(model, 3))


def test_a_slot_keeps_nothing_of_the_version_before(model: DecoderForCausalLM) -> None:
    table = AdapterTable(model, SlotSizes(1, 2))
    layers = dict(model.named_layers())
    table.load("poet", content(model, 1, O, Q))
    table.load("poet", content(model, 2, O))
    of_queries = layers["model.layers.0.self_attn.qkv_proj"].lora
    assert of_queries._ranks.sum() == 0 and layers[O].lora._ranks.tolist() == [[2]]
    assert layers[O].lora.a[0].eq(2).all()


def test_an_unload_removes_all_versions_that_no_request_holds(model: DecoderForCausalLM) -> None:
    table = AdapterTable(model, SlotSizes(3, 2))
    told: list[list[str]] = []
    held = [table.load("poet", content(model, 0), pinned=True)]
    table.connect(lambda: held, lambda cards: told.append([card.label.name for card in cards]))
    table.load("poet", content(model, 1))
    with pytest.raises(Conflict, match="the adapter 'poet' is in use"):
        table.unload("poet")
    assert versions(table) == ["poet@0", "poet@1"]
    held.clear()
    assert table.unload("poet") and not table.unload("poet")
    assert versions(table) == [] and told == [["poet", "poet"], []]
    for name in ("poet", "poet@1"):
        with pytest.raises(NotFound, match=f"no adapter '{name}'; this server has none"):
            table.find(name)
    assert table.load("poet", content(model, 2)).label.version == 2, "a version is one content for ever"


def test_a_retired_adapter_keeps_its_slot_until_its_requests_have_ended(model: DecoderForCausalLM) -> None:
    table = AdapterTable(model, SlotSizes(3, 2))
    held = [table.load("poet", content(model, 0), pinned=True)]
    table.connect(lambda: held, lambda _: None)
    table.load("poet", content(model, 1))
    assert table.unload("poet", retire=True)
    assert versions(table) == [] and not table.serves("poet") and not table.unload("poet", retire=True)
    for name in ("poet", "poet@0"):
        with pytest.raises(NotFound, match="this server has none"):
            table.find(name)
    assert table.load("clerk", content(model, 2)).slot == 1, "the version that no request holds is gone"
    again = table.load("poet", content(model, 3))
    assert (again.label.version, again.slot) == (2, 2)
    with pytest.raises(NotFound, match="no version 0 of the adapter 'poet'; this server has 2"):
        table.find("poet@0")
    with pytest.raises(AdapterError, match=r"poet@2 \(newest\); poet@0 \(unloaded, in use\)$"):
        table.load("third", content(model, 1))
    held.clear()
    assert table.load("third", content(model, 1)).slot == 0
    assert versions(table) == ["clerk@0", "poet@2", "third@0"]


def test_a_request_of_another_rank_keeps_the_slot_of_a_retired_adapter(
    model: DecoderForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = AdapterTable(model, SlotSizes(2, 2))
    table.load("poet", content(model, 0))
    monkeypatch.setattr(
        Communicator, "gather_ints", lambda _, mine: [list(mine), [*mine[:-2], 1, 0]]  # a request there has slot 0
    )  # fmt: skip
    assert table.unload("poet", retire=True)
    assert table.load("clerk", content(model, 1)).slot == 1
    with pytest.raises(AdapterError, match=r"clerk@0 \(newest\); poet@0 \(unloaded, in use\)$"):
        table.load("third", content(model, 1))


def test_another_rank_may_refuse_for_all(model: DecoderForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    table = AdapterTable(model, SlotSizes(2, 2))
    answers: list[Sequence[int]] = []

    def with_peer(_: Communicator, mine: Sequence[int]) -> list[list[int]]:
        return [list(mine), list(answers.pop(0) if answers else mine)]

    monkeypatch.setattr(Communicator, "gather_ints", with_peer)
    monkeypatch.setattr(Communicator, "all_agree", lambda self, mine: all(vote for (vote,) in self.gather_ints([mine])))
    answers[:] = [[0]]
    with pytest.raises(AdapterError, match="another rank cannot serve the adapter 'poet'"):
        table.load("poet", content(model, 0))
    answers[:] = [[1], [7, 0, 0]]
    with pytest.raises(AdapterError, match="the ranks read other contents of the adapter 'poet'"):
        table.load("poet", content(model, 0))
    assert versions(table) == []


def test_a_request_of_another_rank_holds_its_version(
    model: DecoderForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = AdapterTable(model, SlotSizes(2, 2))
    table.load("poet", content(model, 0))
    table.load("poet", content(model, 1))
    monkeypatch.setattr(
        Communicator, "gather_ints", lambda _, mine: [list(mine), [*mine[:-2], 1, 0]]  # a request there has slot 0
    )  # fmt: skip
    with pytest.raises(AdapterError, match=r"poet@0 \(in use\); poet@1 \(newest\)$"):
        table.load("clerk", content(model, 2))
    with pytest.raises(Conflict, match="in use"):
        table.unload("poet")
    assert versions(table) == ["poet@0", "poet@1"]


def test_a_name_may_pin_a_version() -> None:
    assert adapter_ref("org/poet:a@12") == ("org/poet:a", 12)
    for text in ("poet", "poet@", "@3", "poet@x", "a@b@3", "poet@1234567890"):
        assert adapter_ref(text) == (text, None)
    assert fault_of_name("org/poet:v-2 b") is None
    for name in ("", "a\nb", "x" * 129, "poet@3", "@"):
        assert fault_of_name(name) is not None, name


def test_names_that_no_adapter_can_have_are_refused(model: DecoderForCausalLM) -> None:
    table = AdapterTable(model, SlotSizes(2, 2), reserved=["tiny"])
    for name, reason in (("a@3", "holds no '@'"), ("tiny", "is the name of the model"), ("", "printable text")):
        with pytest.raises(AdapterError, match=reason):
            table.load(name, content(model, 0))
    with pytest.raises(AdapterError, match="start it with --enable-lora"):
        AdapterTable(model).load("poet", content(model, 0))


def test_adapters_that_come_together_get_slots_as_if_one_after_the_other(model: DecoderForCausalLM) -> None:
    table = AdapterTable(model, SlotSizes(3, 2))
    held = [table.load("poet", content(model, 0))]
    table.connect(lambda: held, lambda _: None)
    for count, name in enumerate(("poet", "clerk"), 1):
        table.load(name, content(model, count))
    both = [table.prepare(name, content(model, 3)) for name in ("poet", "clerk")]
    planned = table.plan(both)
    assert [(each.label.name, each.label.version, each.slot) for each in planned] == [("poet", 2, 1), ("clerk", 1, 2)]
    assert versions(table) == ["poet@0", "poet@1", "clerk@0"], "nothing has changed"
    table.require_room(["poet", "clerk", "monk"])
    told = r"poet@0 \(in use\); poet@1 \(newest\); clerk@0 \(newest\)$"
    with pytest.raises(AdapterError, match=told):
        table.plan([*both, table.prepare("monk", content(model, 3))])
    held.clear()
    with pytest.raises(AdapterError, match="all 3 slots are taken"):
        table.require_room(["poet", "clerk", "monk", "cook"])


def test_a_version_that_is_written_back_has_its_content(model: DecoderForCausalLM) -> None:
    table = AdapterTable(model, SlotSizes(1, 2))
    served = table.load("poet", content(model, 1))
    before = [matrix.clone() for layer in table.places._slots for matrix in layer.content(0)]
    (planned,) = table.plan([table.prepare("poet", content(model, 2))])
    kept = table.content(planned)
    table.write(planned)
    table.write_back(planned, kept)
    after = [matrix for layer in table.places._slots for matrix in layer.content(0)]
    assert all(map(torch.equal, before, after)) and table.find("poet") == served
