"""The compiled gated delta rule against plain torch in float64; steps, chunks, batches and snapshots change no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.kernels.ops import Ops, plain_ops
from tests.check_programs import TARGETS, headers_with, run_check
from tests.delta_rule import Operator, Sequences, Sizes
from tests.kernels import error, native_ops

plain = plain_ops().gated_delta
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
SIZES = [
    Sizes(1, 1, 1, 1, 1),
    Sizes(2, 4, 24, 20, 4),
    Sizes(3, 3, 17, 33, 2),
    Sizes(1, 4, 8, 64, 3),
    Sizes(1, 2, 128, 128, 4),
]
LENS = (1, 37, 3, 16, 2, 65)
SIZE = Sizes(2, 4, 24, 40, 4)
PROGRAM = Path(__file__).with_name("check_delta_rule.cpp")


@pytest.fixture(scope="module")
def native() -> Ops:
    return native_ops()


@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_are_as_exact_as_in_plain_torch(native: Ops, dtype: torch.dtype, sizes: Sizes) -> None:
    mine = Sequences(sizes, LENS, dtype)
    got, near = (mine.run(operator, mine.chunks(20)) for operator in (native.gated_delta, plain))
    exact = mine.to(torch.float64)
    want = exact.run(plain, exact.at_once())
    assert [part.dtype for part in (got.read[0], got.state[0], got.conv[0])] == [dtype, torch.float32, dtype]
    assert all(torch.equal(one, two.to(dtype)) for one, two in zip(got.conv, want.conv, strict=True))
    for ours, theirs, right in ((got.read, near.read, want.read), (got.state, near.state, want.state)):
        one, two, three = (torch.cat([part.flatten() for part in parts]) for parts in (ours, theirs, right))
        assert error(one, three) <= 1.3 * error(two, three) + 4e-7


def _same_bits(sequences: Sequences, operator: Operator) -> bool:
    whole = sequences.run(operator, sequences.at_once())
    ways = [sequences.alone(), *(sequences.chunks(size) for size in (1, 7, 16, 40))]
    same = all(sequences.run(operator, steps).equals(whole) for steps in ways)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        return same and sequences.run(operator, sequences.at_once()).equals(whole)
    finally:
        torch.set_num_threads(threads)


@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_chunks_batches_and_threads_change_no_bit(native: Ops, dtype: torch.dtype, sizes: Sizes) -> None:
    assert _same_bits(Sequences(sizes, LENS, dtype), native.gated_delta)


@pytest.mark.parametrize("operator", ["native", "plain"])
@pytest.mark.parametrize("cuts", [[16, 32], [1], [2, 3, 5, 31, 32, 33, 90]])
def test_a_snapshot_goes_on_as_the_sequence_did(native: Ops, operator: str, cuts: list[int]) -> None:
    sequences = Sequences(SIZE, (100,), torch.bfloat16)
    chosen = native.gated_delta if operator == "native" else plain
    whole = sequences.run(chosen, sequences.at_once())
    if operator == "native":
        assert sequences.through_snapshots(chosen, cuts).equals(whole)
    else:
        torch.testing.assert_close(sequences.through_snapshots(chosen, cuts).read, whole.read)


def test_two_sequences_begin_from_one_snapshot(native: Ops) -> None:
    sequences = Sequences(SIZE, (30, 30), torch.float32)
    sequences.projected[1][:20] = sequences.projected[0][:20]
    want = sequences.run(native.gated_delta, sequences.alone())
    pools = sequences.pools(4)
    first, second = sequences.projected
    sequences.call(native.gated_delta, first[:20], pools, [20], [0], [-1], [(0, 20, 3)])
    rest = sequences.call(native.gated_delta, torch.cat((first[20:], second[20:])), pools, [10, 10], [1, 2], [3, 3])
    assert torch.equal(rest, torch.cat([read[20:] for read in want.read]))
    assert torch.equal(pools[1][[1, 2]], torch.stack(want.state))


def test_a_sequence_of_nans_stays_alone(native: Ops) -> None:
    sequences = Sequences(SIZE, (20, 20, 20), torch.float32)
    want = sequences.run(native.gated_delta, sequences.at_once())
    sequences.projected[1][5] = torch.nan
    got = sequences.run(native.gated_delta, sequences.chunks(8))
    assert got.read[1][5:].isnan().any() and got.state[1].isnan().any()
    for n in (0, 2):
        assert torch.equal(got.read[n], want.read[n]) and torch.equal(got.state[n], want.state[n])


def _wrong(native: Operator, change: str) -> Operator:
    """Return the operator with one mistake, named `change`, in its operands or its states."""

    def call(projected: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        (*weights, norm, eps), conv_pool, state_pool, lens, rows, sources, snapshots = rest[:5], *rest[5:]
        if change == "every step begins from zeros":
            sources = torch.full_like(sources, -1)
        if change == "the convolution begins from zeros":
            conv_pool[sources.clamp(min=0)] = 0
        if change == "snapshots a token late":
            snapshots = snapshots + (snapshots[:, 1:2] < lens[0]) * torch.tensor([0, 1, 0])
        if change == "slower decay":
            weights[1] = weights[1] - 0.5
        if change == "gates of b and a exchanged":
            heads = state_pool.shape[1]
            projected = torch.cat((projected[:, : -2 * heads], projected[:, -2 * heads :].roll(heads, 1)), dim=1)
        out = native(projected, *weights, norm, eps, conv_pool, state_pool, lens, rows, sources, snapshots)
        if change == "states in bfloat16":
            state_pool[rows] = state_pool[rows].bfloat16().float()
        return out

    return call


@pytest.mark.mutant
@pytest.mark.parametrize(
    "change", ["every step begins from zeros", "the convolution begins from zeros", "states in bfloat16"]
)
def test_a_step_that_changes_bits_is_noticed(native: Ops, change: str) -> None:
    sequences = Sequences(SIZE, LENS, torch.float32)
    assert _same_bits(sequences, _wrong(native.gated_delta, "nothing"))
    assert not _same_bits(sequences, _wrong(native.gated_delta, change))


@pytest.mark.mutant
def test_a_late_snapshot_is_noticed(native: Ops) -> None:
    sequences = Sequences(SIZE, (100,), torch.float32)
    with pytest.raises(AssertionError):
        sequences.through_snapshots(_wrong(native.gated_delta, "snapshots a token late"), [16, 32])


@pytest.mark.mutant
@pytest.mark.parametrize("change", ["slower decay", "gates of b and a exchanged"])
def test_another_rule_is_noticed(native: Ops, change: str) -> None:
    sequences = Sequences(SIZE, LENS, torch.float32)
    exact = sequences.to(torch.float64)
    want = torch.cat(exact.run(plain, exact.at_once()).read)
    for operator, is_right in ((native.gated_delta, True), (_wrong(native.gated_delta, change), False)):
        got = torch.cat(sequences.run(operator, sequences.at_once()).read)
        assert (error(got, want) < 1e-5) == is_right
        assert is_right or error(got, want) > 1e-2


@pytest.mark.parametrize(
    ("message", "lens", "rows", "sources", "snapshots"),
    [
        ("the step has", [3], [0], [-1], []),
        ("no tokens", [4, 0], [0, 1], [-1, -1], []),
        ("no such source", [4], [0], [2], []),
        ("no such copy", [4], [2], [-1], []),
        ("no such copy", [4], [0], [-1], [(0, 5, 1)]),
        ("no such copy", [4], [0], [-1], [(0, 0, 1)]),
        ("no such copy", [4], [0], [-1], [(1, 2, 1)]),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    native: Ops,
    message: str,
    lens: list[int],
    rows: list[int],
    sources: list[int],
    snapshots: list[tuple[int, int, int]],
) -> None:
    sequences = Sequences(SIZE, (4,), torch.float32)
    with pytest.raises(RuntimeError, match=message):
        sequences.call(native.gated_delta, sequences.projected[0], sequences.pools(2), lens, rows, sources, snapshots)


@pytest.mark.full(but="native")
@pytest.mark.parametrize("target", TARGETS)
def test_the_rule_passes_its_checks_on_every_processor(target: str) -> None:
    done = run_check(PROGRAM, target)
    assert done.returncode == 0, done.stdout
    if target != "native":
        assert done.stdout.startswith(f"{target}: ")


# By the complaint: the right text in delta_rule.h, and the mistake that replaces it.
MISTAKES = {
    # States are loaded in bfloat16.
    "other bits": ("load(from + there, n)", "round_bf16(load(from + there, n))"),
    # The state does not decay.
    "far from": ("load(place) * kept", "load(place)"),
}


@pytest.mark.mutant
@pytest.mark.parametrize("complaint", list(MISTAKES))
def test_a_mistake_in_the_source_is_noticed(tmp_path: Path, complaint: str) -> None:
    done = run_check(PROGRAM, headers=headers_with(("delta_rule.h", *MISTAKES[complaint]), tmp_path))
    assert done.returncode != 0 and complaint in done.stdout


@DTYPES
@pytest.mark.parametrize(("tokens", "size", "gates"), [(1, 16, 16), (9, 50, 50), (7, 48, 1), (12, 60, 3), (0, 8, 2)])
def test_sigmoid_gates_agree_with_float64(native: Ops, dtype: torch.dtype, tokens: int, size: int, gates: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator).to(dtype)
    gate = (3 * torch.randn(tokens, gates + 5, generator=generator)).to(dtype)[:, 2 : 2 + gates]
    got = native.sigmoid_gate(hidden, gate)
    exact = hidden.double().view(tokens, gates, size // gates) * gate.double().sigmoid().unsqueeze(-1)
    for out in (got, plain_ops().sigmoid_gate(hidden, gate)):
        torch.testing.assert_close(out.double(), exact.view(tokens, size), rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert all(torch.equal(native.sigmoid_gate(hidden[t : t + 1], gate[t : t + 1])[0], got[t]) for t in range(tokens))
