"""Refreshes of a model that is held in 8 and 4 bits as on CUDA, by the interpreted kernels of buckets and of pairs.

No tensor goes by itself.  Single tensors would leave the same content and fingerprints.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

import tests.interpreted  # noqa: F401  # isort: skip  # before any module with kernels

from rollout.kernels.row_places import ROW_FORMS
from tests.held_refresh import digest_of, newer, updater_of
from tests.loopback_updater import LoopbackSource, LoopbackUpdater
from tests.model_zoo import tiny_checkpoint
from tests.pair_forms import FORM_OF
from tests.unit.weight_sync.test_gpu_held_weights import held, is_held, ops_of
from weight_sync import in_model, pairs_gpu, shadow, spans_gpu, take_pairs, take_spans
from weight_sync.checker import live_fingerprints
from weight_sync.errors import CommitError, ContentError
from weight_sync.fingerprint import fingerprint
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import TensorMeta

Named = dict[str, torch.Tensor]
MODES: tuple[StagingMode, ...] = ("host", "device", "journal", "in_place")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, whose matrices are blocks that are cut; `test_pairs_gpu` has larger ones."""
    sizes = {"hidden_size": 96, "moe_intermediate_size": 64, "layers": 1, "experts": 2, "top_k": 1}
    return tiny_checkpoint(tmp_path_factory.mktemp("held") / "plain", "moe", dtype="bfloat16", **sizes)


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take buckets as for weights on a device, whose memory has no pages that could be traded."""
    monkeypatch.setattr(take_spans, "kernels_of", lambda device: spans_gpu)
    monkeypatch.setattr(take_pairs, "kernels_of", lambda device: pairs_gpu)
    monkeypatch.setattr(pairs_gpu, "_ROWS", pairs_gpu.TILE)
    monkeypatch.setattr(ShadowStaging, "_folds_early", lambda self, storage: True)
    monkeypatch.setattr(shadow, "tradable_spans", lambda pairs: [[] for _ in pairs])


def sent_as(form: str, tensors: Named) -> tuple[Named, Named]:
    """Return the tensors as a sender has them, and their values."""
    parts = FORM_OF.get(form)
    if parts is None:
        return tensors, tensors
    sent = parts.quantised(tensors, lambda name, _: is_held(name))
    return sent, parts.values_of(sent, torch.bfloat16)


def begun(updater: LoopbackUpdater, sent: Named) -> None:
    stated = [(TensorMeta(name, x.dtype, tuple(x.shape)), fingerprint(x)) for name, x in sent.items()]
    updater.begin("v2", manifest=stated)


def received(updater: LoopbackUpdater, sent: Named) -> None:
    """Send all tensors in one bucket; none goes by itself."""
    alone = mock.Mock(side_effect=AssertionError("a tensor came by itself"))
    with mock.patch.object(ShadowStaging, "write", alone), mock.patch.object(in_model._InModelStaging, "write", alone):
        updater.receive(LoopbackSource(list(sent.items())))


CASES = [("fp8", "fp8", "host"), ("int4", "int4", "journal")]
ALL = [
    pytest.param(sent, form, mode, marks=() if (sent, form, mode) in CASES else pytest.mark.full)
    for sent in ("bfloat16", "fp8", "int4")
    for form in ROW_FORMS
    for mode in MODES
    if (sent, form) != ("int4", "int4-128")  # which is refused
]


@pytest.mark.parametrize(("sent_form", "form", "mode"), ALL)
def test_a_refresh_keeps_both_fingerprints(folder: Path, sent_form: str, form: str, mode: StagingMode) -> None:
    updater, tensors = updater_of(folder, ops_of(form), mode), newer(folder)
    sent, values = sent_as(sent_form, tensors)
    wanted = held(values, form)
    if sent_form == form:  # what has parts is held as it came
        came = FORM_OF[form].in_parts(sent)
        wanted |= {name: x for name, x in values.items() if name in came}
    for _ in range(2):  # the second time by the same plan
        begun(updater, sent)
        received(updater, sent)
        updater.verify()
        result = updater.commit()
        assert (result.digests.sent, result.digests.held) == (digest_of(sent), digest_of(wanted))
        assert live_fingerprints(updater.weights) == {name: fingerprint(x) for name, x in wanted.items()}


def bytes_of(updater: LoopbackUpdater) -> dict[str, torch.Tensor]:
    places = {name: updater.weights.places(name)[0].storage for name in updater.weights.held_formats()}
    return {name: storage.view(torch.uint8).clone() for name, storage in places.items()}


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("mode", ["host", pytest.param("in_place", marks=pytest.mark.full)])
def test_a_wrong_weight_is_found_before_any_byte_changes(folder: Path, mode: StagingMode) -> None:
    updater, (sent, _) = updater_of(folder, ops_of("fp8"), mode), sent_as("fp8", newer(folder))
    before = bytes_of(updater)
    name = next(name for name in sent if name.endswith("_scale_inv"))
    for change in (-1.0, 1.5):
        wrong = sent | {name: sent[name] * change}
        begun(updater, sent)
        with pytest.raises(ContentError, match=f"{name}: (a scale is negative|fingerprint)"):
            received(updater, wrong)
        updater.abort()
        assert all(torch.equal(now, before[name]) for name, now in bytes_of(updater).items())


@pytest.mark.full
def test_a_vote_that_is_lost_brings_the_old_bytes_back(folder: Path) -> None:
    updater, (sent, _) = updater_of(folder, ops_of("fp8"), "device"), sent_as("fp8", newer(folder))
    before = bytes_of(updater)
    begun(updater, sent)
    received(updater, sent)
    updater.verify()
    with mock.patch.object(updater, "_commit_vote", lambda mine: False), pytest.raises(CommitError):
        updater.commit()
    assert all(torch.equal(now, before[name]) for name, now in bytes_of(updater).items())


def test_parts_in_two_buckets_go_by_tables(folder: Path) -> None:
    updater, (sent, values) = updater_of(folder, ops_of("fp8"), "device"), sent_as("fp8", newer(folder))
    scales = {name: x for name, x in sent.items() if name.endswith("_scale_inv")}
    begun(updater, sent)
    for part in (scales, {name: x for name, x in sent.items() if name not in scales}):
        received(updater, part)
    updater.verify()
    updater.commit()
    assert live_fingerprints(updater.weights) == {name: fingerprint(x) for name, x in values.items()}
