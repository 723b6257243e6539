"""`use_engine_numerics`: a Hugging Face model that computes as the engine does.

Shapes: B rows of a batch, S positions, T tokens that are not padding, V vocabulary, L MoE layers, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from capture.replay import find_routers
from capture.routers import weights_of
from rollout.core.errors import Conflict, UnsupportedFeature
from rollout.numerics.adapters import active_adapter, base_tensors, without_peft
from rollout.numerics.checks import check_call, checked_engine, device_of, trained_tensors
from rollout.numerics.engine import RouteChoice
from rollout.numerics.sequences import Sequences

_IN_USE = "_engine_numerics"


class EngineNumerics:
    """A model under engine numerics, until `remove` or the end of a `with` block.

    `routes`: the routers' choices in the last forward, int64 [B, S, L, K], -1 for padding; None for a dense model.
    `batch_invariant`: whether its log-probabilities equal an engine's bit for bit.  `config_digest`: equal to an
    engine's in `/model_info` if both compute by the same configuration.
    """

    def __init__(self, model: Any, dtype: torch.dtype, allow_inexact: bool, config_digest: str | None) -> None:
        self.routes: torch.Tensor | None = None
        self._model, self._dtype = model, dtype
        self._device = device_of(model)
        with torch.inference_mode(False):  # its tensors are written outside of inference mode, too
            self._engine = checked_engine(model, dtype, self._device, allow_inexact)
        self.batch_invariant = self._engine.batch_invariant
        self.config_digest = self._engine.config.digest
        if config_digest not in (None, self.config_digest):
            raise UnsupportedFeature(
                f"the engine computes by the configuration {config_digest}, the model by {self.config_digest}: "
                "make the model with the engine's --json-model-override-args, and leave out --latent-norm-eps"
            )
        self._routers = find_routers(model) if self._engine.config.is_moe else []
        assert len(self._routers) == len(self._engine.config.moe_layer_ids), "a router for each MoE layer"
        setattr(model, _IN_USE, True)
        self._restore = _replace_forward(model, self._forward)

    def remove(self) -> None:
        """Give the model its own forward back.  Once is enough."""
        if getattr(self._model, _IN_USE, False):
            delattr(self._model, _IN_USE)
            self._restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedFeature("a model under engine numerics cannot be copied or pickled; remove() them first")

    def _forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        check_call(self._model, input_ids, others)
        assert input_ids is not None
        config = self._engine.config
        sequences = Sequences.of(input_ids, attention_mask, position_ids)
        sequences.check(config.vocab_size, config.max_position_embeddings)
        tensors = base_tensors(self._model, trained_tensors(self._model, self._device))
        self._engine.load(tensors, active_adapter(self._model))
        hidden_TD, routes_TLK = self._engine.forward(sequences, self._route_choice(sequences))
        if routes_TLK is not None:
            self.routes = sequences.spread(routes_TLK, -1).unflatten(0, tuple(input_ids.shape))
        tokens, found = sequences.kept(logits_to_keep)
        wanted = tokens.flatten()[found]
        if wanted.shape[0] != hidden_TD.shape[0]:
            hidden_TD = hidden_TD.index_select(0, wanted)
        logits_NV = self._engine.logits(hidden_TD).to(torch.promote_types(self._model.dtype, self._dtype))
        if found.shape[0] != tokens.numel():
            whole = logits_NV.new_zeros(tokens.numel(), logits_NV.shape[1])
            logits_NV = whole.index_copy(0, found, logits_NV)
        logits = logits_NV.unflatten(0, tuple(tokens.shape))
        output = (MoeCausalLMOutputWithPast if config.is_moe else CausalLMOutputWithPast)(logits=logits)
        return output.to_tuple() if return_dict is False else output

    def _route_choice(self, sequences: Sequences) -> RouteChoice | None:
        """Return a function by which hooks on the model's routers force or record routes; None without hooks."""
        if not any(router._forward_hooks for router in self._routers):
            return None

        def choice(layer: int, normed_TD: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor | None:
            router: Any = self._routers[layer]
            with torch.no_grad():
                logits_TE = F.linear(normed_TD, router.weight.float(), _bias_of(router))
                # padding gets experts like other tokens, so that recorded routes can be forced
                experts = torch.arange(router.top_k, device=ids_TK.device)
                logits, ids = sequences.spread(logits_TE, 0), sequences.spread(ids_TK, experts)
                restore = _replace_forward(router, lambda *_: (logits, weights_of(router, logits, ids), ids))
                try:
                    _, _, chosen = router(sequences.spread(normed_TD, 0))
                finally:
                    restore()
            return None if chosen is ids else chosen.index_select(0, sequences.rows)

        return choice


def use_engine_numerics(
    model: nn.Module,
    *,
    dtype: torch.dtype = torch.bfloat16,
    allow_inexact: bool = False,
    config_digest: str | None = None,
) -> EngineNumerics:
    """Make a Hugging Face causal language model compute with the engine's operators, forward and backward.

    With `engine_logprobs`, log-probabilities and routes equal the ones of an engine of this `dtype` (bfloat16 or
    float32) with the same weights, bit for bit, on the same machine.  Parameters stay the model's own, in bfloat16 or
    float32, which a forward rounds as a refresh does; gradients are computed in float32, straight through that
    rounding.  A `PeftModel` computes with its active LoRA adapter.  The model's `forward` takes whole sequences, padded
    or packed, and gives logits in the wider of both dtypes.  The result of this call has the routes, which follow
    `capture.replay.force_routes` within its context.

    `allow_inexact`: accept plain torch as the engine's operators, whose bits depend on the batch.  `config_digest`: the
    digest in the engine's `/model_info`, which the model's own configuration must have.  Raises `UnsupportedFeature`,
    and `Conflict` if it is in use already; the model is unchanged then.
    """
    model = without_peft(model)
    if getattr(model, _IN_USE, False):
        raise Conflict("the model is under engine numerics already; remove() them first")
    return EngineNumerics(model, dtype, allow_inexact, config_digest)


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the module's `forward` until the returned function is called."""
    before = vars(module).get("forward")
    vars(module)["forward"] = forward

    def restore() -> None:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before

    return restore


def _bias_of(router: Any) -> torch.Tensor | None:
    bias = getattr(router, "bias", None)
    return bias.float() if isinstance(bias, torch.Tensor) else None
