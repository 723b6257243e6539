"""The Triton kernel of the fingerprint, in Triton's interpreter: bit for bit the plain sums; and compiled for sm_90."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.interpreted import compiling_environment  # isort: skip  # before any module with kernels
import triton.language as tl

from tests.tiers import examples
from weight_sync import block_sums as plain
from weight_sync import content_check, fingerprint_gpu
from weight_sync import fingerprint as prints
from weight_sync.block_sums import kernels_of, plain_block_sums, trial
from weight_sync.errors import ContentError
from weight_sync.fingerprint import combine, fingerprint
from weight_sync.fingerprint_words import BLOCK, UNSIGNED, multipliers

MASK = (1 << 64) - 1


def random_words(width: int, numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (numel * width,), generator=generator, dtype=torch.uint8).view(UNSIGNED[width])


def finite_values(dtype: torch.dtype, numel: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert bool(values.float().isfinite().all())
    return values


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as a GPU's, with the interpreted kernel."""
    monkeypatch.setattr(prints, "kernels_of", lambda device: fingerprint_gpu)


@pytest.mark.parametrize("width", sorted(UNSIGNED))
@pytest.mark.parametrize("mask", [0, 0x41])
def test_block_sums_are_the_operators(width: int, mask: int) -> None:
    for num_blocks in (0, 1, 9):
        words = random_words(width, num_blocks * BLOCK).view(num_blocks, BLOCK)
        found = fingerprint_gpu.gpu_block_sums(words, mask)
        wanted = plain_block_sums(words, multipliers("cpu"), mask)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@settings(max_examples=examples(60), deadline=None)
@given(
    width=st.sampled_from(sorted(UNSIGNED)),
    offset=st.one_of(st.integers(0, 3 * BLOCK), st.integers(2**31 - 2, 2**40)),
    numel=st.integers(0, 2 * BLOCK + 5),
    seed=st.integers(0, 9),
)
def test_any_shard_at_any_offset(width: int, offset: int, numel: int, seed: int) -> None:
    words = random_words(width, numel, seed)
    (value,) = fingerprint_gpu.gpu_sum(words, offset).tolist()
    assert value & MASK == prints._contiguous(words, offset)


def test_a_bucket_is_checked_through_it(on_gpu: None) -> None:
    good = [("a", finite_values(torch.bfloat16, 100)), ("b", finite_values(torch.float32, 256 * BLOCK + 1))]
    assert content_check.check_content(good, {}) == {name: fingerprint(tensor) for name, tensor in good}
    bad = good[1][1].clone()
    bad[BLOCK] = float("nan")
    with pytest.raises(ContentError, match="not finite in b"):
        content_check.check_content([good[0], ("b", bad)], {})


def test_kernel_fingerprints_of_shards_add_up(on_gpu: None) -> None:
    words = random_words(2, 3 * BLOCK).view(torch.bfloat16)
    parts = [
        fingerprint(words[:100]),
        fingerprint(words[100 : 2 * BLOCK], 100),
        fingerprint(words[2 * BLOCK :], 2 * BLOCK),
    ]
    assert combine(*parts) == prints.combine(fingerprint(words))
    assert combine(parts[1], parts[0], fingerprint(words[2 * BLOCK :], 2 * BLOCK + 1)) != fingerprint(words)


# --- the choice -------------------------------------------------------------------------------------------------------


def test_a_cpu_and_a_machine_without_triton_take_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_of(torch.device("cpu")) is None
    monkeypatch.setattr(plain.importlib.util, "find_spec", lambda name: None)
    assert kernels_of.__wrapped__(torch.device("cuda")) is None


def test_the_trial_passes_the_kernel_and_a_machine_that_cannot_run_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trial(fingerprint_gpu, torch.device("cpu")) is None
    monkeypatch.setattr(plain, "trial", lambda kernels, device: "it is broken")
    with pytest.warns(UserWarning, match="plain torch, which is slower: it is broken"):
        assert kernels_of.__wrapped__(torch.device("cuda")) is None


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", ["one_more", "flag_lost", "raises"])
def test_a_wrong_kernel_does_not_pass_the_trial(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, right = ModuleType("kernels"), fingerprint_gpu.gpu_block_sums

    def gpu_block_sums(words: torch.Tensor, mask: int) -> tuple[torch.Tensor, torch.Tensor]:
        sums, found = right(words, mask)
        if wrong == "raises":
            raise RuntimeError("no ptxas")
        return (sums + 1, found) if wrong == "one_more" else (sums, found & False)

    kernels.gpu_block_sums = gpu_block_sums  # type: ignore[attr-defined]
    monkeypatch.setattr(plain.importlib, "import_module", lambda name: kernels)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)  # there is no CUDA device here
    with pytest.warns(UserWarning):
        assert kernels_of.__wrapped__(torch.device("cuda")) is None


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", ["signed", "32_bits"])
def test_products_of_another_width_are_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: words taken as signed; a block's a(c) in 32 bits."""
    words = random_words(4, 2 * BLOCK)
    if wrong == "signed":
        shown = words.view(torch.int32)
        monkeypatch.setattr(fingerprint_gpu, "UNSIGNED", {4: torch.int32})
    else:
        shown = words
        mix = fingerprint_gpu.mix_odd
        monkeypatch.setattr(fingerprint_gpu, "mix_odd", lambda k: mix(k).to(tl.uint32).to(tl.uint64))
    value = int(fingerprint_gpu.gpu_sum(shown, 0)) & MASK
    assert value != prints._contiguous(words, 0)


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from benchmarks.gpu_kernels_table import resources
from weight_sync.fingerprint_gpu import compile_cases
for name, kernel, types, constants, warps, stages in compile_cases():
    ordered = {arg: (types | dict.fromkeys(constants, "constexpr"))[arg] for arg in kernel.arg_names}
    source = ASTSource(kernel, ordered, constants)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "mul.lo.s64" in compiled.asm["ptx"] or "mad.lo.s64" in compiled.asm["ptx"], name
    registers, spilled = resources(compiled.asm["cubin"])
    assert spilled == 0, (name, registers, spilled)
    print(name)
"""


@pytest.mark.full
def test_every_configuration_compiles_for_hopper() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=compiling_environment(), capture_output=True, text=True, timeout=300
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert len(shown.stdout.split()) == 8
