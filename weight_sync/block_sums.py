"""Sums of words times fixed 64-bit multipliers, block by block: the inner loop of the fingerprint.

    S(c) = sum over j of  b(j) * (w_cj + 1)   mod 2^64        b(j) = splitmix64(2j + 1) | 1,  j < BLOCK

`torch.ops.weight_sync.block_sums` computes them, and `shard_sums` does so for many equally long tensors, each where it
lies.  A faster kernel for a device is registered there, as engines do for CPUs; on a CUDA device with Triton it is
`fingerprint_gpu`'s (`kernels_of`).  Without one:

* 64-bit products that wrap, on any device: eight bytes of scratch a word.
* On a CPU whose int8 matrix product is fast: every byte of a word is multiplied by the digits, to base 128, of its own
  multiplier `b(j) * 256^k`, in one uint8 x int8 -> int32 product.  A digit lies in [-64, 63], so a block's sum stays
  below 2^30, and no instruction that adds pairs in 16 bits can saturate (255 * 64 * 2 < 2^15).  It is used where torch
  has such a product and a trial at first use gave the same sums.

A block may be shorter than `BLOCK` words: a run of the words of a whole one, with as many multipliers as it has words.

Shapes: N blocks, J words of a block, W bytes of it (J times the word's width), M digits of a multiplier; S shards, J
words of a shard, K blocks that a shard touches.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from types import ModuleType

import torch

from weight_sync.fingerprint_words import BLOCK, SIGNED, UNSIGNED, multipliers, signed

_WRAPPING_BLOCKS = 128  # of one chunk: a 4 MiB scratch, which stays in a CPU cache
_DIGIT_BLOCKS = 1024  # of one chunk: 8 MiB of bfloat16, 64 KiB of sums
_NUM_DIGITS = 10  # of 7 bits each, 64 bits in all
_COLUMNS = 16  # a vector of int32
_MIN_DIGIT_BLOCKS = 8  # below, the preparation costs more than the products
_VECTOR_PRODUCTS = ("AVX512",)  # as torch names them; elsewhere oneDNN goes byte by byte


def plain_block_sums(words: torch.Tensor, table: torch.Tensor, mask: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sums without a kernel: words [N, J] times `table`, int64 [J].

    And bool [N]: whether a word of the block has all bits of `mask`.
    """
    masked_N = torch.full(words.shape[:1], mask == 0, device=words.device)
    if mask:
        for chunk, found in zip(words.split(_WRAPPING_BLOCKS), masked_N.split(_WRAPPING_BLOCKS)):
            found.copy_(((chunk.view(SIGNED[words.element_size()]) & mask) == mask).any(1))
    is_worth_it = words.device.type == "cpu" and words.shape[0] >= _MIN_DIGIT_BLOCKS
    first = _first_of(table) if is_worth_it else None
    if first is not None and _digits_serve(words.element_size()):
        return digit_block_sums(words, first), masked_N
    return wrapping_block_sums(words, table), masked_N


def _first_of(table: torch.Tensor) -> int | None:
    """Return which of the fixed multipliers the table begins with; None for other multipliers."""
    fixed = multipliers("cpu")
    is_part = table.untyped_storage().data_ptr() == fixed.untyped_storage().data_ptr() and table.is_contiguous()
    return int(table.storage_offset()) if is_part else None


def _cuda_block_sums(words: torch.Tensor, table: torch.Tensor, mask: int) -> tuple[torch.Tensor, torch.Tensor]:
    kernels = kernels_of(words.device) if words.shape[1] == BLOCK else None
    return plain_block_sums(words, table, mask) if kernels is None else kernels.gpu_block_sums(words, mask)


def shard_sums(shards: Sequence[torch.Tensor], first: int) -> torch.Tensor:
    """Return the sums of the blocks that each shard touches, without the "+ 1": int64 [S, K], which wraps.

    `shards`: S tensors of J elements, contiguous, of one width and device, each read where it lies.  `first`: which of
    the fixed multipliers their first element meets.  There is no operator without a kernel: `sums_where_they_lie`.
    """
    table = multipliers(str(shards[0].device))
    found: torch.Tensor = torch.ops.weight_sync.shard_sums(shards, table, first)
    return found


def row_sums(words_SJ: torch.Tensor, first: int) -> torch.Tensor:
    """Return what `shard_sums` does, on any device, of shards that are the rows of a matrix, of a dtype in `UNSIGNED`.

    Where blocks are cut, the words of several rows are copied.
    """
    (count, size), table = words_SJ.shape, multipliers(str(words_SJ.device))
    head = min(-first % BLOCK, size)  # the words before the first block that begins in a row
    tail = size - (size - head) % BLOCK
    found = []
    for begin, end, at in ((0, head, first), (head, tail, 0), (tail, size, 0)):
        if begin < end:
            length = min(BLOCK, end - begin)
            words = words_SJ[:, begin:end].contiguous().view(-1, length)
            sums, _ = torch.ops.weight_sync.block_sums(words, table[at : at + length], 0)
            found.append(sums.view(count, -1))
    return torch.cat(found, 1)


def sums_where_they_lie(device: torch.device) -> bool:
    """Return whether `shard_sums` is a compiled kernel on `device`; elsewhere shards are joined first."""
    return device.type == "cpu" and torch._C._dispatch_has_kernel_for_dispatch_key("weight_sync::shard_sums", "CPU")


torch.library.define("weight_sync::block_sums", "(Tensor words, Tensor multipliers, int mask) -> (Tensor, Tensor)")
torch.library.impl("weight_sync::block_sums", "CompositeExplicitAutograd", plain_block_sums)
torch.library.impl("weight_sync::block_sums", "CUDA", _cuda_block_sums)
torch.library.define("weight_sync::shard_sums", "(Tensor[] shards, Tensor multipliers, int first) -> Tensor")


@functools.cache
def kernels_of(device: torch.device) -> ModuleType | None:
    """Return `fingerprint_gpu`, for a CUDA device with Triton, if a trial there gives plain torch's sums; warn if not.

    None: plain torch computes.  The only place where that is decided.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    kernels = importlib.import_module("weight_sync.fingerprint_gpu")
    try:
        reason = trial(kernels, device)
    except Exception as error:  # no compiler for Triton's launcher, a driver that is too old
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        warnings.warn(f"fingerprints on {device} are computed by plain torch, which is slower: {reason}", stacklevel=2)
        return None
    return kernels


def trial(kernels: ModuleType, device: torch.device) -> str | None:
    """Return why `kernels` are not to be used on `device`; None where a few blocks of every width give plain torch's
    sums.
    """
    raw = torch.randint(0, 256, (3 * BLOCK * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for width, dtype in UNSIGNED.items():
        words, mask = raw.view(dtype)[: 3 * BLOCK].view(3, BLOCK), (1 << (8 * width - 2)) - 1
        found = kernels.gpu_block_sums(words.to(device), mask)
        wanted = plain_block_sums(words, multipliers("cpu"), mask)
        if not all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True)):
            return f"its kernel gives other sums of {8 * width}-bit words"
    return None


def wrapping_block_sums(words: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
    """Sum words [N, J] times `table`, int64 [J] (None: the fixed multipliers), by 64-bit products: int64 [N]."""
    (num_blocks, size), device = words.shape, words.device
    table = multipliers(str(device))[:size] if table is None else table
    step = _WRAPPING_BLOCKS * BLOCK // max(size, 1)
    scratch = torch.empty(min(num_blocks, step), size, dtype=torch.int64, device=device)
    sums = torch.empty(num_blocks, dtype=torch.int64, device=device)
    for start in range(0, num_blocks, step):
        chunk = words[start : start + step]
        products = scratch[: chunk.shape[0]].copy_(chunk).mul_(table)
        torch.sum(products, 1, out=sums[start : start + chunk.shape[0]])
    return sums


def digit_block_sums(words: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Compute `wrapping_block_sums` by one matrix product of bytes and digits a chunk; on a CPU.

    `first`: which of the fixed multipliers a block's first word meets.
    """
    (num_blocks, size), width = words.shape, words.element_size()
    digits_WM = _digits(width)[first * width : (first + size) * width]
    bytes_NW = words.view(torch.uint8)
    sums = torch.empty(num_blocks, dtype=torch.int64)
    part_NM = torch.empty(min(num_blocks, _DIGIT_BLOCKS), digits_WM.shape[1], dtype=torch.int32)
    for start in range(0, num_blocks, _DIGIT_BLOCKS):
        chunk = bytes_NW[start : start + _DIGIT_BLOCKS]
        part = torch._int_mm(chunk, digits_WM, out=part_NM[: chunk.shape[0]])
        torch.sum(part.to(torch.int64).mul_(_powers()), 1, out=sums[start : start + chunk.shape[0]])
    return sums


@functools.lru_cache(maxsize=4)
def _digits(width: int) -> torch.Tensor:
    """Return the digits [W, M] int8 of the multiplier of every byte of a block."""
    table = multipliers("cpu")
    rest = torch.stack([table * signed(1 << (8 * byte)) for byte in range(width)], 1).view(-1)
    digits_WM = torch.zeros(BLOCK * width, _COLUMNS, dtype=torch.int8)
    for position in range(_NUM_DIGITS):
        digit = ((rest + 64) & 127) - 64
        digits_WM[:, position] = digit
        rest = (rest - digit) >> 7
    return digits_WM


@functools.lru_cache(maxsize=1)
def _powers() -> torch.Tensor:
    """Return 128^position mod 2^64 of every column [M]; 0 for columns that only fill a vector."""
    return torch.tensor([signed((1 << (7 * m)) % (1 << 64)) if m < _NUM_DIGITS else 0 for m in range(_COLUMNS)])


@functools.lru_cache(maxsize=4)
def _digits_serve(width: int) -> bool:
    """Return whether torch multiplies 8-bit matrices with vector instructions here, and digits give the right sums.

    Capability decides, not a trial of speed: a few milliseconds on a busy machine would decide for good.
    """
    if torch.backends.cpu.get_cpu_capability() not in _VECTOR_PRODUCTS or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(width)
    raw = torch.randint(0, 256, (_MIN_DIGIT_BLOCKS, BLOCK * width), dtype=torch.uint8, generator=generator)
    words = raw.view(UNSIGNED[width])
    try:
        return torch.equal(digit_block_sums(words), wrapping_block_sums(words))
    except (RuntimeError, AttributeError):  # a build of torch without this product
        return False
