"""FlashInfer's backend with prompts of latent attention in expanded form: keys and values of heads, made for a step.

    prompts    new tokens    latents of the step  -> keys, values -> causal attention     | joined by their
               prefixes      latents of the cache -> keys, values -> attention, in rounds | log-sum-exp
    decodes    the absorbed form: queries and results meet latents

A score takes nope + rd products in this form, and R + rd in the absorbed one.  A mean takes v, and R.  To expand a
latent takes R (nope + v) products for each head, as many as to absorb a token's query and its result.  So new tokens
always save products.  A prefix is expanded again for each step that extends its sequence, which pays from some number
of new tokens on.  A step decides for all its prompts, by the number of products: `saves_products`.  With very many
cached tokens it stays absorbed.

FlashInfer's wrapper for keys outside of pages takes them (`BatchPrefillWithRaggedKVCacheWrapper`).  **Not run** on a
device.  Written against flashinfer-python 0.7.2.post1.

Shapes: X new tokens of prompts, N sequences that extend, n of a round, P positions of a round, B decoding requests,
H heads, R rank of latents, rd rotated elements, nope the others of a key, v value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.attention.base import Expand, LatentForm
from rollout.attention.flashinfer import FlashInferBackend, is_latent
from rollout.attention.flashinfer_kinds import Dtypes
from rollout.attention.flashinfer_sequences import StepSequences
from rollout.core.errors import StartupError
from rollout.core.forward_batch import ForwardBatch
from rollout.memory.kv_pool import KVPool

# Positions of prefixes that are expanded at once: 0.9 GB of keys and values for 128 heads of DeepSeek-V3 in bfloat16.
_ROUND = 8192
# Most rounds of a step: each has a wrapper of its own, with 8 MiB on the device and on the host.
_MAX_ROUNDS = 32
# Sizes of a key and a value that FlashInfer has kernels for.
_HEAD_SIZES = ((64, 64), (128, 128), (192, 128), (256, 256))


class Prefixes(NamedTuple):
    """The prefixes of a round: positions `first_n` .. `first_n + counts_n - 1` of consecutive `sequences`."""

    sequences: slice
    first_n: np.ndarray
    counts_n: np.ndarray


class _Round(NamedTuple):
    """A planned call: queries `rows` meet the keys in `slots` [P]."""

    wrapper: Any
    rows: slice
    slots: torch.Tensor


def saves_products(form: LatentForm, extend_lens: np.ndarray, prefix_lens: np.ndarray) -> bool:
    """Return whether the expanded form takes fewer products for these prompts [N] than the absorbed one."""
    pairs = int((extend_lens * prefix_lens + extend_lens * (extend_lens + 1) // 2).sum())
    saved = (2 * form.rank + form.rotary) - (form.nope + form.rotary + form.value)
    return pairs * saved > int(prefix_lens.sum()) * form.rank * (form.nope + form.value)


def rounds_of(prefix_lens: np.ndarray, most: int) -> list[Prefixes]:
    """Cut prefixes [N] into rounds of at most `most` positions.  Every sequence of a round has some in it."""
    rounds: list[list[tuple[int, int, int]]] = []  # of each: sequence, first position, positions
    room = 0
    for sequence, length in enumerate(prefix_lens.tolist()):
        first = 0
        while first < length:
            if not room or rounds[-1][-1][0] < sequence - 1:
                rounds.append([])
                room = most
            count = min(room, length - first)
            rounds[-1].append((sequence, first, count))
            first, room = first + count, room - count
    found = []
    for spans in rounds:
        sequences, first_n, counts_n = np.array(spans, dtype=np.int64).T
        found.append(Prefixes(slice(int(sequences[0]), int(sequences[-1]) + 1), first_n, counts_n))
    return found


class ExpandedPrompts:
    """Plans and launches of one form.  `plan` is called once a step, `run` in every layer."""

    def __init__(self, library: Any, form: LatentForm, dtypes: Dtypes, workspace: torch.Tensor) -> None:
        """Make a form's plans.  Raises `StartupError` for sizes without a kernel, in the largest step, at startup."""
        sizes = form.nope + form.rotary, form.value
        if sizes not in _HEAD_SIZES:
            raise StartupError(
                f"--attention-backend flashinfer_expanded has no kernel for keys of {sizes[0]} elements and values of "
                f"{sizes[1]}: give flashinfer"
            )
        self._library, self._form, self._dtypes, self._workspace = library, form, dtypes, workspace
        self._wrappers: list[Any] = []
        self._rounds: list[_Round] = []

    def plan(self, sequences: StepSequences, rounds: Sequence[Prefixes]) -> None:
        """Plan the new tokens of the step, then its prefixes round by round."""
        lens_N, prefixes_N = sequences.extend_lens, sequences.prefix_lens
        ends_N = np.cumsum(lens_N)
        everything = Prefixes(slice(0, len(lens_N)), prefixes_N, lens_N)
        self._rounds = []
        for part in (everything, *rounds):
            of_part = part.sequences
            rows = slice(int(ends_N[of_part.start] - lens_N[of_part.start]), int(ends_N[of_part.stop - 1]))
            wrapper = self._wrapper(len(self._rounds))
            self._plan(wrapper, lens_N[of_part], part.counts_n, causal=part is everything)
            slots = sequences.slots_of(of_part, part.first_n, part.counts_n)
            self._rounds.append(_Round(wrapper, rows, slots))

    def run(self, q: torch.Tensor, pool: torch.Tensor, expand: Expand) -> torch.Tensor:
        """Attend with q [X, H, nope + rd] to latents of `pool` [S, 1, R + rd].  Returns [X, H, v]."""
        new, *prefixes = self._rounds
        if not prefixes:
            alone: torch.Tensor = self._attend(new, q, pool, expand, return_lse=False)
            return alone
        out: torch.Tensor
        out, sums = self._attend(new, q, pool, expand, return_lse=True)
        for each in prefixes:
            part, its_sums = self._attend(each, q, pool, expand, return_lse=True)
            self._library.merge_state_in_place(out[each.rows], sums[each.rows], part, its_sums)
        return out

    def _attend(self, each: _Round, q: torch.Tensor, pool: torch.Tensor, expand: Expand, return_lse: bool) -> Any:
        keys, values = expand(pool.index_select(0, each.slots).squeeze(1))
        return each.wrapper.run(q[each.rows], keys, values, return_lse=return_lse)

    def _wrapper(self, number: int) -> Any:
        """Return a wrapper of its own for each round: a plan stays until the last layer."""
        if number == len(self._wrappers):
            self._wrappers.append(self._library.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD"))
        return self._wrappers[number]

    def _plan(self, wrapper: Any, query_lens_n: np.ndarray, key_lens_n: np.ndarray, causal: bool) -> None:
        form = self._form
        wrapper.plan(
            _indptr(query_lens_n, self._workspace.device),
            _indptr(key_lens_n, self._workspace.device),
            form.num_heads,
            form.num_heads,
            form.nope + form.rotary,
            form.value,
            causal=causal,
            sm_scale=form.scale,
            q_data_type=self._dtypes[0],
            kv_data_type=self._dtypes[1],
        )


class FlashInferExpandedBackend(FlashInferBackend):
    """FlashInfer's backend, with prompts in expanded form where that saves products.

    A captured step only decodes, and a step in captured pieces attends to latents: both stay in the absorbed form.
    """

    def _begin(self) -> None:
        super()._begin()
        self._prompts: dict[LatentForm, ExpandedPrompts] = {}
        self._num_tokens: dict[LatentForm, int] = {}  # of the step planned last

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        if not any(k.numel() and is_latent(k, v) for k, v in zip(kv.k, kv.v, strict=True)):
            return "it is for latent attention, which this model lacks"
        return FlashInferBackend.obstacle(kv, kernels_available)

    def plan(self, batch: ForwardBatch) -> None:
        super().plan(batch)
        self._num_tokens.clear()

    def expanded_tokens(self, form: LatentForm) -> int:
        if form not in self._num_tokens:
            self._num_tokens[form] = self._plan_prompts(form)
        return self._num_tokens[form]

    def attend_expanded(
        self, layer: int, form: LatentForm, prompts: torch.Tensor, decodes: torch.Tensor, expand: Expand
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.kv.k[layer], self.kv.v[layer]
        values = self._prompts[form].run(prompts, k, expand)
        kind = self._planned(layer, decodes, form.scale, None)
        return values.flatten(1), kind.run_decodes(decodes, k, v, self.kv.scales[layer]).flatten(1)

    def _plan_prompts(self, form: LatentForm) -> int:
        sequences = self._sequences
        assert sequences is not None, "plan comes before attend"
        if form not in self._prompts:  # first: the largest step, at startup, may stay absorbed
            shared = self._shared
            self._prompts[form] = ExpandedPrompts(shared.library, form, shared.dtypes, shared.workspace)
        rounds = rounds_of(sequences.prefix_lens, _ROUND)
        if len(rounds) > _MAX_ROUNDS or not saves_products(form, sequences.extend_lens, sequences.prefix_lens):
            return 0
        self._prompts[form].plan(sequences, rounds)
        self._copied.record()
        return sequences.num_extend_tokens


def _indptr(lens_n: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """Return where each sequence begins, and the end [n + 1] int32, on the host, page-locked for a CUDA device."""
    indptr = torch.zeros(len(lens_n) + 1, dtype=torch.int32, pin_memory=device.type == "cuda")
    np.cumsum(lens_n, out=indptr.numpy()[1:])
    return indptr
