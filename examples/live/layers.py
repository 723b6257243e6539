"""Training of the last layers of a model in bfloat16, with float32 masters.

The other layers, the embedding and the output matrix are frozen.  Autograd keeps nothing of the layers below, and a
refresh sends only what was trained.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep_rl import LockstepError

WARMUP_STEPS = 5


class LayersError(LockstepError, ValueError):
    """The model does not have the layers that were asked for."""


class LastLayers:
    """AdamW over the last `count` decoder layers of a transformers model.

    The model may have any dtype; its weights are the float32 masters, rounded to bfloat16.  The learning rate rises
    over the first steps, stays, and falls to a tenth over the last half of `num_steps`.
    """

    def __init__(self, model: Any, count: int, learning_rate: float, num_steps: int) -> None:
        layers = model.model.layers
        if not 1 <= count <= len(layers):
            raise LayersError(f"the model has {len(layers)} layers, and {count} of them cannot be trained")
        model.requires_grad_(False)
        first = len(layers) - count
        self.named: dict[str, torch.Tensor] = {
            f"model.layers.{first + index}.{name}": weight.requires_grad_(True)
            for index, layer in enumerate(layers[first:])
            for name, weight in layer.named_parameters()
        }
        self._masters = [weight.detach().to(torch.float32, copy=True) for weight in self.named.values()]
        self._adam = torch.optim.AdamW(self._masters, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))

        def share(step: int) -> float:
            falling = min(1.0, 1.0 - 0.9 * (2 * step / num_steps - 1))
            return min((step + 1) / WARMUP_STEPS, 1.0) * falling

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._adam, share)

    def step(self) -> float:
        """Apply the gradients of the weights and clear them; return their norm before it was clipped to 1."""
        for master, weight in zip(self._masters, self.named.values()):
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adam.step()
        self._schedule.step()
        self._adam.zero_grad()
        self._round()
        return float(norm)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the trained tensors by the names of the checkpoint."""
        return [(name, weight.detach()) for name, weight in self.named.items()]

    @torch.no_grad()
    def _round(self) -> None:
        for master, weight in zip(self._masters, self.named.values()):
            weight.copy_(master.to(torch.bfloat16))
