"""`WeightTransaction`: what each state refuses, what is verified, and that a failed commit leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.logical_weights_fake import (
    EMBED,
    GATE_UP,
    LM_HEAD,
    NORM,
    FakeWeights,
    bits,
    expert_name,
    fused,
    version,
)
from weight_sync import shadow
from weight_sync.errors import (
    CommitError,
    ContentError,
    CoverageError,
    TransactionStateError,
    WeightRequestError,
    WeightSyncError,
)
from weight_sync.fingerprint import fingerprint
from weight_sync.tensor_meta import TensorMeta
from weight_sync.transaction import TransactionState, WeightTransaction

Tensors = dict[str, torch.Tensor]
Entry = tuple[TensorMeta, int | None]


def manifest_of(tensors: Tensors, stated: bool = True) -> list[Entry]:
    return [
        (TensorMeta(name, tensor.dtype, tuple(tensor.shape)), fingerprint(tensor) if stated else None)
        for name, tensor in tensors.items()
    ]


def agree(mine: bool) -> bool:
    return mine


def recording(votes: list[bool]) -> Callable[[bool], bool]:
    def vote(mine: bool) -> bool:
        votes.append(mine)
        return mine

    return vote


@pytest.fixture
def weights() -> FakeWeights:
    return FakeWeights(seed=0)


def expect_content(weights: FakeWeights, seed: int) -> None:
    assert weights.snapshot() == FakeWeights(seed).snapshot()


@pytest.mark.parametrize("form", [dict, fused], ids=["per expert", "fused"])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_full_refresh_serves_what_was_sent(
    weights: FakeWeights, form: Callable[[Tensors], Tensors], with_manifest: bool
) -> None:
    sent = form(version(1))
    manifest = manifest_of(sent, stated=form is dict) if with_manifest else None
    addresses = [t.data_ptr() for t in (weights.embed, weights.norm, weights.w13, weights.w2)]
    transaction = WeightTransaction(weights, "v1", manifest=manifest)
    for name, tensor in sent.items():
        assert len(transaction.missing) > 0
        transaction.receive([(name, tensor)])
        expect_content(weights, 0)
    transaction.verify()
    expect_content(weights, 0)
    votes: list[bool] = []
    transaction.commit(recording(votes))
    assert votes == [True]
    assert sorted(transaction.received) == sorted(weights.metas())
    assert transaction.state is TransactionState.COMMITTED
    expect_content(weights, 1)
    assert addresses == [t.data_ptr() for t in (weights.embed, weights.norm, weights.w13, weights.w2)]


def test_a_partial_refresh_changes_only_what_came(weights: FakeWeights) -> None:
    new = version(1)
    name = expert_name(1, "up_proj")
    transaction = WeightTransaction(weights, coverage="partial")
    transaction.receive([(name, new[name])])
    assert bits(transaction.read_staged(name)[0].content) == bits(new[name])  # type: ignore[index]
    assert transaction.read_staged(NORM) is None
    transaction.verify()
    transaction.commit(agree)
    assert transaction.received == [name]
    for other in weights.metas():
        assert bits(weights.read(other)) == bits(version(1 if other == name else 0)[other])


def test_a_manifest_may_name_both_of_tied_tensors(weights: FakeWeights) -> None:
    sent = version(1)
    sent[LM_HEAD] = sent[EMBED].clone()
    transaction = WeightTransaction(weights, manifest=manifest_of(sent))
    transaction.receive(sent.items())
    transaction.verify()
    transaction.commit(agree)
    expect_content(weights, 1)


def test_a_declared_subset_must_come_exactly(weights: FakeWeights) -> None:
    new = version(1)
    subset = {name: new[name] for name in (NORM, EMBED)}

    def open_subset() -> WeightTransaction:
        return WeightTransaction(weights, coverage="partial", manifest=manifest_of(subset))

    transaction = open_subset()
    transaction.receive([(NORM, new[NORM])])
    with pytest.raises(CoverageError, match=f"1 of 2 tensors missing: {EMBED}"):
        transaction.verify()
    transaction = open_subset()
    other = expert_name(0, "up_proj")
    with pytest.raises(CoverageError, match="was not announced"):
        transaction.receive([(other, new[other])])
    transaction = open_subset()
    transaction.receive(subset.items())
    transaction.verify()
    transaction.commit(agree)
    assert sorted(transaction.received) == sorted(subset)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_no_position_hides_a_nan(dtype: torch.dtype) -> None:
    """The finite check is a vectorised reduction; every lane and the remainder count."""
    for position in range(6 * 4):
        weights = FakeWeights(dtype=dtype)
        embed = torch.full((6, 4), 3.0, dtype=dtype)
        embed.view(-1)[position] = float("nan")
        transaction = WeightTransaction(weights, coverage="partial")
        with pytest.raises(ContentError):
            transaction.receive([(EMBED, embed)])


def test_large_values_are_finite() -> None:
    weights = FakeWeights(dtype=torch.float16)
    transaction = WeightTransaction(weights, coverage="partial")
    transaction.receive([(EMBED, torch.full((6, 4), 65504.0, dtype=torch.float16))])
    transaction.verify()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_checked_too(dtype: torch.dtype) -> None:
    for value, refused in ((1.5, False), (float("nan"), True)):
        weights = FakeWeights(dtype=dtype)
        transaction = WeightTransaction(weights, coverage="partial")
        bucket = [(EMBED, torch.full((6, 4), value).to(dtype))]
        if refused:
            with pytest.raises(ContentError):
                transaction.receive(bucket)
        else:
            transaction.receive(bucket)
            transaction.verify()


@pytest.mark.parametrize(
    "bucket",
    [
        [("ghost", torch.zeros(1))],
        [(NORM, torch.zeros(5))],
        [(NORM, torch.zeros(4, dtype=torch.float64))],
        [(EMBED, version(1)[EMBED])],
    ],
    ids=["unknown", "shape", "dtype", "again"],
)
def test_one_bad_bucket_spoils_the_transaction(weights: FakeWeights, bucket: list[tuple[str, torch.Tensor]]) -> None:
    transaction = WeightTransaction(weights)
    sent = version(1)
    transaction.receive([(EMBED, sent.pop(EMBED))])
    with pytest.raises(WeightRequestError) as first:
        transaction.receive(bucket)
    assert transaction.state is TransactionState.FAILED
    assert transaction.failure == str(first.value)
    for step in (lambda: transaction.receive(sent.items()), transaction.verify, lambda: transaction.commit(agree)):
        with pytest.raises(TransactionStateError, match="failed: "):
            step()
    transaction.abort()
    expect_content(weights, 0)


def verified(weights: FakeWeights) -> WeightTransaction:
    transaction = WeightTransaction(weights)
    transaction.receive(version(1).items())
    transaction.verify()
    return transaction


def test_w01_a_vote_that_raises_leaves_the_transaction_in_doubt(weights: FakeWeights) -> None:
    """Others may have the new version in force: it is neither put back nor called committed."""

    def late(mine: bool) -> bool:
        raise TimeoutError("no vote in time")

    transaction = verified(weights)
    with pytest.raises(TimeoutError, match="no vote in time"):
        transaction.commit(late)
    assert transaction.state is TransactionState.IN_DOUBT
    for call in (transaction.abort, lambda: transaction.commit(lambda mine: mine), transaction.verify):
        with pytest.raises(TransactionStateError, match="in doubt"):
            call()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each part be exchanged by a call of its own."""
    monkeypatch.setattr(shadow, "_TOGETHER_BYTES", 0)


def failing(transaction: WeightTransaction, fail_at: int, times: int = 1) -> None:
    """Let the staging's exchange raise before it does anything, at `times` calls from call number `fail_at` on."""
    exchange, count = transaction._staging.exchange, iter(range(1000))  # type: ignore[attr-defined]

    def faulty(live: Sequence[torch.Tensor], aside: Sequence[torch.Tensor]) -> None:
        if fail_at <= next(count) < fail_at + times:
            raise RuntimeError("device lost")
        exchange(live, aside)

    transaction._staging.exchange = faulty  # type: ignore[attr-defined]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("failing_write", range(4))
def test_a_restore_that_fails_says_so(weights: FakeWeights, failing_write: int) -> None:
    transaction = verified(weights)
    failing(transaction, failing_write, times=100)
    with pytest.raises(CommitError) as caught:
        transaction.commit(agree)
    assert caught.value.restored == (failing_write == 0)  # nothing was written then
    assert (transaction.torn is None) == caught.value.restored


@pytest.mark.parametrize("failing_write", range(2))
def test_small_parts_are_exchanged_by_one_call(weights: FakeWeights, failing_write: int) -> None:
    before = weights.snapshot()
    transaction = verified(weights)
    failing(transaction, failing_write)
    if failing_write == 1:  # there is no second call
        transaction.commit(agree)
        expect_content(weights, 1)
    else:
        with pytest.raises(CommitError, match="device lost; the old weights were restored"):
            transaction.commit(agree)
        assert weights.snapshot() == before


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("share", [0, 1, 2])
def test_a_write_that_stops_half_way_is_never_called_restored(weights: FakeWeights, share: int) -> None:
    """`exchange` raises after a part: its undo cannot know which, but the sum of the old words does."""
    before = weights.snapshot()
    transaction = verified(weights)
    exchange = transaction._staging.exchange  # type: ignore[attr-defined]
    count = iter(range(1000))

    def half(live: Sequence[torch.Tensor], aside: Sequence[torch.Tensor]) -> None:
        if next(count) != 2:
            exchange(live, aside)
            return
        done = live[0].numel() * share // 2
        exchange([live[0][:done]], [aside[0][:done]])
        raise RuntimeError("device lost")

    transaction._staging.exchange = half  # type: ignore[attr-defined]
    with pytest.raises(CommitError) as caught:
        transaction.commit(agree)
    assert caught.value.restored == (weights.snapshot() == before) == (share == 0)


def test_calls_out_of_order_are_refused(weights: FakeWeights) -> None:
    transaction = WeightTransaction(weights)
    with pytest.raises(TransactionStateError, match="cannot commit: the weight update is open"):
        transaction.commit(agree)
    transaction.receive(version(1).items())
    transaction.verify()
    for step in (lambda: transaction.receive([]), transaction.verify):
        with pytest.raises(TransactionStateError, match="verified"):
            step()
    transaction.commit(agree)
    for over in (transaction.verify, lambda: transaction.commit(agree), transaction.abort):
        with pytest.raises(TransactionStateError, match="committed"):
            over()
    transaction = verified(weights)
    transaction.abort()
    assert transaction.read_staged(NORM) is None
    with pytest.raises(TransactionStateError, match="aborted"):
        transaction.abort()


def test_every_error_has_a_status() -> None:
    def below(kind: type[WeightSyncError]) -> list[type[WeightSyncError]]:
        return [kind, *(deeper for child in kind.__subclasses__() for deeper in below(child))]

    assert {kind.status_code for kind in below(WeightSyncError)} <= {400, 404, 409, 500, 502}


def test_gate_up_halves_go_where_they_belong(weights: FakeWeights) -> None:
    gate_up = torch.arange(3 * 4 * 4).view(3, 4, 4).to(torch.bfloat16)
    transaction = WeightTransaction(weights, coverage="partial")
    transaction.receive([(GATE_UP, gate_up)])
    transaction.verify()
    transaction.commit(agree)
    assert torch.equal(weights.w13, gate_up[[0, 1, 2, 1]])
