"""Plans of buckets: replayed as long as the same lists come and the places stay, and never for other ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from unittest import mock

import pytest
import torch

from rollout.kernels.places import ViewPlace
from tests.logical_weights_fake import EMBED, LM_HEAD, E, FakeWeights, bits, expert_name, fused, version
from tests.loopback_updater import LoopbackSource, LoopbackUpdater, new_updater
from weight_sync import plan as plan_module
from weight_sync.content import Digests, TensorTable
from weight_sync.errors import ContentError, CoverageError
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.known_calls import KnownCalls
from weight_sync.plan import Planner
from weight_sync.receivers.base import KnownCall
from weight_sync.shadow import ShadowStaging
from weight_sync.tensor_meta import BucketLayout, TensorMeta

Named = dict[str, torch.Tensor]


class MovableWeights(FakeWeights):
    """Fake weights whose experts change slots: logical expert of each slot."""

    slots: tuple[int, ...] = (0, 1, 2, 1)

    def places_key(self) -> Hashable:
        return self.slots

    def places(self, name: str) -> list[ViewPlace]:
        return [ViewPlace(target) for target in self._places(name)]

    def _places(self, name: str) -> list[torch.Tensor]:
        if "experts" not in name:
            return super()._places(name)
        expert, projection = name.split(".")[-3:-1]
        mine = [slot for slot, logical in enumerate(self.slots) if logical == int(expert)]
        if projection == "down_proj":
            return [self.w2[slot] for slot in mine]
        half = self.w13.shape[1] // 2
        rows = slice(0, half) if projection == "gate_proj" else slice(half, 2 * half)
        return [self.w13[slot, rows] for slot in mine]


@pytest.fixture
def weights() -> MovableWeights:
    return MovableWeights()


@pytest.fixture
def updater(weights: MovableWeights) -> LoopbackUpdater:
    return new_updater(weights)


def refresh(updater: LoopbackUpdater, tensors: Named, label: str, *, packed: bool = True) -> None:
    updater.begin(label)
    updater.receive(LoopbackSource(list(tensors.items()), packed=packed))
    updater.verify()
    updater.commit()


def require_content(weights: FakeWeights, tensors: Named) -> None:
    """Require that every place of every tensor holds this content."""
    for name, tensor in tensors.items():
        assert {bits(place.read()) for place in weights.places(name)} == {bits(tensor)}, name


@pytest.fixture
def made() -> Iterator[mock.Mock]:
    """Count the plans that are made."""
    with mock.patch.object(plan_module, "plan_bucket", wraps=plan_module.plan_bucket) as counted:
        yield counted


def test_a_planned_part_leaves_the_rest_as_it_was(updater: LoopbackUpdater, weights: MovableWeights) -> None:
    old, name = version(1), expert_name(0, "gate_proj")
    refresh(updater, old, "1")
    sent = {name: version(2)[name]}
    updater.begin("2", coverage="partial")
    updater.receive(LoopbackSource(list(sent.items()), packed=True))
    updater.verify()
    updater.commit()
    require_content(weights, old | sent)


def test_the_second_refresh_makes_no_plan(updater: LoopbackUpdater, weights: MovableWeights, made: mock.Mock) -> None:
    for seed in (1, 2, 3):
        refresh(updater, version(seed), str(seed))
        require_content(weights, version(seed))
    assert made.call_count == 1


@pytest.mark.parametrize("form", [dict, fused])
def test_a_replay_leaves_what_single_tensors_leave(form: type) -> None:
    planned, single = MovableWeights(), MovableWeights()
    for seed in (1, 2):
        by_plan, one_by_one = new_updater(planned), new_updater(single)
        refresh(by_plan, form(version(seed)), str(seed))
        refresh(one_by_one, form(version(seed)), str(seed), packed=False)
        assert planned.snapshot() == single.snapshot()
        assert by_plan.model.content.digests == one_by_one.model.content.digests
        live = digest((meta, fingerprint(planned.read(name))) for name, meta in planned.metas().items())
        assert by_plan.model.content.digests == Digests(live, live)


def test_a_replay_writes_no_single_tensor(updater: LoopbackUpdater) -> None:
    with mock.patch.object(ShadowStaging, "write", side_effect=AssertionError("a tensor came by itself")):
        refresh(updater, version(1), "1")


def test_a_plan_ends_when_experts_move(updater: LoopbackUpdater, weights: MovableWeights, made: mock.Mock) -> None:
    refresh(updater, version(1), "1")
    weights.slots = (2, 0, 1, 0)
    refresh(updater, version(2), "2")
    require_content(weights, version(2))
    assert made.call_count == 2


def test_a_plan_that_outlives_a_move_is_noticed(updater: LoopbackUpdater, weights: MovableWeights) -> None:
    """A wrong variant: the key of the places stays where they move."""
    with mock.patch.object(MovableWeights, "places_key", lambda self: None):
        refresh(updater, version(1), "1")
        weights.slots = (2, 0, 1, 0)
        refresh(updater, version(2), "2")
    with pytest.raises(AssertionError, match="experts"):
        require_content(weights, version(2))


def test_a_sender_that_changes_its_layout_half_way_gets_other_plans(
    updater: LoopbackUpdater, weights: MovableWeights, made: mock.Mock
) -> None:
    refresh(updater, version(1), "1")
    names = sorted(version(2))
    updater.begin("2")
    for part in (names[:3], names[3:]):
        updater.receive(LoopbackSource([(name, version(2)[name]) for name in part]))
    updater.verify()
    updater.commit()
    require_content(weights, version(2))
    assert made.call_count == 3


@pytest.mark.parametrize("bad", ["nan", "bit"])
def test_a_replay_checks_what_it_copies(updater: LoopbackUpdater, weights: MovableWeights, bad: str) -> None:
    refresh(updater, version(1), "1")
    before, sent = weights.snapshot(), version(2)
    stated = [(TensorMeta(name, t.dtype, tuple(t.shape)), fingerprint(t)) for name, t in sent.items()]
    name = expert_name(E - 1, "up_proj")
    sent[name] = sent[name].clone()
    sent[name][0, 0] = torch.nan if bad == "nan" else sent[name][0, 0] + 1
    updater.begin("2", manifest=stated)
    with pytest.raises(ContentError, match="finite" if bad == "nan" else "the manifest expects"):
        updater.receive(LoopbackSource(list(sent.items())))
    updater.abort()
    assert weights.snapshot() == before


def test_a_tensor_of_a_replay_comes_once(updater: LoopbackUpdater) -> None:
    updater.begin("1", coverage="partial")
    source = [(EMBED, version(1)[EMBED])]
    updater.receive(LoopbackSource(source))
    with pytest.raises(CoverageError, match=f"{EMBED} came twice"):
        updater.receive(LoopbackSource(source))


def test_tied_names_in_one_bucket_must_agree(updater: LoopbackUpdater) -> None:
    tensors = version(1)
    updater.begin("1", coverage="partial")
    updater.receive(LoopbackSource([(EMBED, tensors[EMBED]), (LM_HEAD, tensors[EMBED])]))
    updater.abort()
    updater.begin("2", coverage="partial")
    with pytest.raises(ContentError, match="other content"):
        updater.receive(LoopbackSource([(EMBED, tensors[EMBED]), (LM_HEAD, tensors[EMBED] + 1)]))


def test_plans_go_with_their_layouts(weights: MovableWeights) -> None:
    planner = Planner(TensorTable(weights.metas()), {})
    meta = weights.metas()[EMBED]
    layout = BucketLayout([meta], [0], meta.nbytes)
    assert planner.plans(weights, [layout], cast=False) == planner.plans(weights, [layout], cast=False)
    assert len(planner._plans) == 1
    del layout
    assert len(planner._plans) == 0


def test_calls_are_kept_up_to_a_number_of_tensors() -> None:
    def call(count: int) -> KnownCall:
        return KnownCall([TensorMeta(str(number), torch.float32, (1,)) for number in range(count)], [])

    known: KnownCalls[KnownCall] = KnownCalls(10)
    first = known.get("a", lambda: call(4))
    known.get("b", lambda: call(4))
    assert known.get("a", lambda: call(0)) is first
    known.get("c", lambda: call(4))  # b was used last of all
    assert known.get("a", lambda: call(0)) is first
    assert known.get("b", lambda: call(1)).num_tensors == 1
    assert known.get("large", lambda: call(99)).num_tensors == 99


def test_calls_without_tensors_do_not_pile_up() -> None:
    known: KnownCalls[KnownCall] = KnownCalls(10)
    for number in range(100):
        known.get(number, lambda: KnownCall((), ()))
    assert len(known._calls) <= 10
