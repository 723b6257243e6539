"""`RoutedExpertsCapturer`: collects what routers choose during one step.

Shapes: T tokens of the step, L MoE layers, K top-k.
"""

from __future__ import annotations

import torch

from capture.routed_experts import narrowest_dtype

_SPARE_ROWS = 64  # small buffers are allocated together: an allocation takes longer than a small step's copies


class RoutedExpertsCapturer:
    """Takes one record of every MoE layer in every step into a buffer that belongs to that step alone.

    `record` copies it.  In a captured step `finish_step` copies the records of all layers together.

    begin_step(T) -> record(0, ids) .. record(L - 1, ids), in any order -> finish_step() -> [T, L, K]

    A layer that records twice or not at all is a bug of the model's code, hence assertions.
    """

    def __init__(
        self,
        num_moe_layers: int,
        top_k: int,
        num_experts: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Store rows in the narrowest type that holds every id, as they are copied, and exchanged by several ranks."""
        self.num_moe_layers = num_moe_layers
        self.top_k = top_k
        self.dtype: torch.dtype = getattr(torch, narrowest_dtype(num_experts, for_torch=True).name)
        self._device = device
        self._rows_TLK: torch.Tensor | None = None
        self._absent: set[int] = set()
        self._held: list[torch.Tensor | None] | None = None  # records that `finish_step` copies; None: by `record`
        self._spare: list[torch.Tensor] = []  # buffers of steps to come

    def begin_step(self, num_tokens: int) -> torch.Tensor:
        """Expect one record of `num_tokens` rows from every MoE layer, and return the buffer for them [T, L, K].

        Drops the records of an unfinished step.
        """
        self._begin(self._spare_rows(num_tokens))
        assert self._rows_TLK is not None
        return self._rows_TLK

    def begin_step_in(self, rows_TLK: torch.Tensor) -> None:
        """Begin a step that records into the caller's buffer, of this capturer's type.

        `finish_step` copies all records together, in two launches on a device.  Until then nothing may change them: so
        it is in a captured step, which takes new memory for each layer's choices.
        """
        self._begin(rows_TLK)
        self._held = [None] * self.num_moe_layers

    def _begin(self, rows_TLK: torch.Tensor) -> None:
        self._rows_TLK, self._held = rows_TLK, None
        self._absent = set(range(self.num_moe_layers))

    def _spare_rows(self, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, self.num_moe_layers, self.top_k)
        if not self._spare or self._spare[-1].shape != shape:
            steps = _SPARE_ROWS // num_tokens if num_tokens else 0
            several = torch.empty((max(steps, 1), *shape), dtype=self.dtype, device=self._device)
            self._spare = list(several.unbind())
        return self._spare.pop()

    def played(self) -> None:
        """Take every layer as recorded: a tape of calls of `record` was played and has copied all of them."""
        self._absent.clear()

    def record(self, moe_layer: int, logical_ids_TK: torch.Tensor) -> None:
        """Take the choices [T, K] of the `moe_layer`-th MoE layer, in the router's order.  Routers call it."""
        assert self._rows_TLK is not None, "record outside a step"
        assert moe_layer in self._absent, f"MoE layer {moe_layer} recorded twice, or does not exist"
        rows_TK = self._rows_TLK.select(1, moe_layer)
        assert logical_ids_TK.shape == rows_TK.shape, f"{tuple(logical_ids_TK.shape)} != {tuple(rows_TK.shape)}"
        if self._held is None:
            rows_TK.copy_(logical_ids_TK)
        else:
            self._held[moe_layer] = logical_ids_TK
        self._absent.remove(moe_layer)

    def finish_step(self) -> torch.Tensor:
        """End the step and return its choices [T, L, K], which the caller may keep."""
        rows_TLK = self._rows_TLK
        assert rows_TLK is not None, "finish outside a step"
        assert not self._absent, f"MoE layers {sorted(self._absent)} did not record"
        if self._held:
            rows_TLK.copy_(torch.stack([ids_TK for ids_TK in self._held if ids_TK is not None], 1))
        self._rows_TLK = self._held = None
        return rows_TLK
