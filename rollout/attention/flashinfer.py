"""Attention over paged KV by FlashInfer, on CUDA: bfloat16 and float16, captured steps included.

Run on an H100 by `tests/gpu`; elsewhere against `tests/flashinfer_stand_in.py`, which has the package's signatures.

    plan, once a step    host: lengths of the batch -> CSR arrays -> a plan for each kind of layer
                         device: slots gathered from the slot table; the plan, copied from page-locked memory
    attend               one or two launches: the tokens that extend, then the ones that decode

A plan is written into page-locked memory that the wrapper keeps, and copied from there while the host goes on.  The
next plan must not write before this copy is done: it waits for an event (mini-sglang's fix 20fcd7f).

Shapes: T tokens, B decoding requests, H query heads, hd head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollout.attention.base import AttentionBackend
from rollout.attention.flash_attention_3 import Fa3Heads
from rollout.attention.flashinfer_kinds import FixedBuffers, GroupedHeads, KindOfLayer, Latents, LayerKind
from rollout.attention.flashinfer_prompts import choose_prompts
from rollout.attention.flashinfer_sequences import StepSequences
from rollout.core.forward_batch import ForwardBatch
from rollout.memory.kv_pool import KVPool

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128, 256)
LATENT_RANK_MULTIPLE, LATENT_ROPE_MULTIPLE = 128, 64
LEAST_CAPABILITY = (8, 0)
# FlashInfer's recommendation for partial results.  In addition, every wrapper has 8 MiB on the device and on the host.
_WORKSPACE_BYTES = 128 << 20
# A plan of a captured step is a few numbers for each request and block of the grid.
_GRAPH_INT_WORKSPACE_BYTES = 1 << 20


class _Shared:
    """The state that a backend shares with the backends of its captured steps.

    `kinds` are the kinds of the layers seen so far, in order.  `indices` by window and `int_workspace` by kind give
    memory that captured steps of all sizes share: one of them runs at a time, planned just before.
    """

    def __init__(self, kv: KVPool, library: Any, new_event: Callable[[], Any]) -> None:
        self.library, self.new_event = library, new_event
        self.device, self.dtypes = kv.k[0].device, (kv.dtype, kv.stored)
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.prompts = "fa2"  # the module of prompts of grouped heads, by FlashInfer's name
        self.own_fa3: Any = None  # FlashAttention 3's own module, which goes before it
        self.kinds: dict[LayerKind, None] = {}
        self._indices: dict[int | None, torch.Tensor] = {}
        self._int_workspaces: dict[LayerKind, torch.Tensor] = {}

    def indices(self, window: int | None, count: int) -> torch.Tensor:
        """Return memory for at least `count` slot indices.  Ask for large batches first: more room means new memory."""
        if window not in self._indices or self._indices[window].numel() < count:
            self._indices[window] = torch.zeros(count, dtype=torch.int32, device=self.device)
        return self._indices[window]

    def int_workspace(self, kind: LayerKind) -> torch.Tensor:
        if kind not in self._int_workspaces:
            size = _GRAPH_INT_WORKSPACE_BYTES
            self._int_workspaces[kind] = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._int_workspaces[kind]


class FlashInferBackend(AttentionBackend):
    """`library` is the package `flashinfer`, and `new_event` makes a CUDA event, by default.

    `plan` waits for the copies of the previous plan only, not for the device.  A kind of layer is planned when it is
    first attended to, from then on in `plan`.

    `batch_invariant` stays False.  `disable_split_kv` and `fixed_split_size` make a decoding token's sums independent
    of the rest of the batch.  But the size of a query tile follows from the average length of the step's extends, and
    the order in which warps share the keys from this size: a token's bits depend on how its sequence was cut into
    chunks.
    """

    def __init__(self, kv: KVPool, library: Any = None, new_event: Callable[[], Any] | None = None) -> None:
        super().__init__(kv)
        if library is None:
            import flashinfer

            library = flashinfer
        self._shared = _Shared(kv, library, new_event or torch.cuda.Event)
        self._begin()

    def _begin(self) -> None:
        self._copied = self._shared.new_event()
        self._kinds: dict[LayerKind, KindOfLayer] = {}
        self._sequences: StepSequences | None = None

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        return _unsupported(kv) or _not_installed()

    def settle(self, all_agree: Callable[[bool], bool]) -> None:
        assert not self._shared.kinds, "modules are chosen before the first step"
        choice = choose_prompts(self._shared.library, self.kv, all_agree)
        self._shared.prompts, self._shared.own_fa3, self.prompts = choice

    def for_graph(self, batch_size: int) -> AttentionBackend:
        return CapturedFlashInfer(self, batch_size)

    def plan(self, batch: ForwardBatch) -> None:
        self._sequences = StepSequences(batch)
        self._copied.synchronize()
        for kind in self._shared.kinds:
            self._plan_kind(kind)
        self._copied.record()

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        k, v = self.kv.k[layer], self.kv.v[layer]
        scale = q.shape[2] ** -0.5 if scale is None else scale
        return self._planned(layer, q, scale, window).run(q, k, v, sinks, self.kv.scales[layer]).flatten(1)

    def _planned(self, layer: int, q: torch.Tensor, scale: float, window: int | None) -> KindOfLayer:
        k, v = self.kv.k[layer], self.kv.v[layer]
        kind = LayerKind(q.shape[1], k.shape[1], q.shape[2], v.shape[2], scale, window, is_latent(k, v))
        if kind not in self._kinds:
            self._shared.kinds[kind] = None
            self._plan_kind(kind)
            self._copied.record()
        return self._kinds[kind]

    def _plan_kind(self, kind: LayerKind) -> None:
        assert self._sequences is not None, "plan comes before attend"
        if kind not in self._kinds:
            shared = self._shared
            given, fixed = (shared.library, kind, shared.dtypes, shared.workspace), self._fixed(kind)
            if kind.is_latent:
                self._kinds[kind] = Latents(*given, fixed)
            elif shared.own_fa3 is not None and fixed is None:
                self._kinds[kind] = Fa3Heads(*given, shared.own_fa3)
            else:
                self._kinds[kind] = GroupedHeads(*given, fixed, shared.prompts)
        self._kinds[kind].plan(*self._sequences.parts(kind.window))

    def _fixed(self, kind: LayerKind) -> FixedBuffers | None:
        return None


class CapturedFlashInfer(FlashInferBackend):
    """The backend of captured steps of `batch_size` decoding requests.

    Layers of a kind that no step had before are planned in their first `attend`, which must not be captured: run a step
    first.  Buffers are sized for requests of the longest context.
    """

    def __init__(self, backend: FlashInferBackend, batch_size: int) -> None:
        AttentionBackend.__init__(self, backend.kv)
        self._shared, self._batch_size = backend._shared, batch_size
        self._begin()

    def for_graph(self, batch_size: int) -> AttentionBackend:
        raise AssertionError("ask the backend that this one was made by")

    def plan(self, batch: ForwardBatch) -> None:
        requests = batch.decode.seq_lens_host.shape[0]
        assert not batch.extend_lens and requests == self._batch_size, "a captured step has its size and only decodes"
        super().plan(batch)

    def _fixed(self, kind: LayerKind) -> FixedBuffers:
        assert self._sequences is not None
        shared, count = self._shared, self._batch_size
        longest = self._sequences.max_context if kind.window is None else kind.window

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=shared.device)

        indices = shared.indices(kind.window, count * longest)
        return FixedBuffers(zeros(count + 1), zeros(count + 1), zeros(count), indices, shared.int_workspace(kind))


def is_latent(k: torch.Tensor, v: torch.Tensor) -> bool:
    return k.data_ptr() == v.data_ptr()


def _unsupported(kv: KVPool) -> str | None:
    for k, v in zip(kv.k, kv.v, strict=True):
        if k.device.type != "cuda":
            return f"it runs on CUDA, not on {k.device.type}"
        if not k.numel():
            continue  # a layer that keeps nothing of a token
        if kv.dtype not in DTYPES:
            return f"it takes bfloat16 and float16, not {kv.dtype}"
        if not is_latent(k, v):
            if k.shape[2] not in HEAD_SIZES:
                return f"it takes heads of {', '.join(map(str, HEAD_SIZES))} elements, not of {k.shape[2]}"
        elif v.shape[2] % LATENT_RANK_MULTIPLE or (k.shape[2] - v.shape[2]) % LATENT_ROPE_MULTIPLE:
            return (
                f"it needs latents of a multiple of {LATENT_RANK_MULTIPLE} elements and a multiple of "
                f"{LATENT_ROPE_MULTIPLE} rotated ones, got {v.shape[2]} and {k.shape[2] - v.shape[2]}"
            )
        capability = torch.cuda.get_device_capability(k.device)
        if capability < LEAST_CAPABILITY:
            return "it needs compute capability {}.{}, this device has {}.{}".format(*LEAST_CAPABILITY, *capability)
    return None


def _not_installed() -> str | None:
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        return f"the package flashinfer cannot be imported ({error}): pip install 'lockstep-rl[cuda]'"
    return None
