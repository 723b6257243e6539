"""Replay on the trainer's side: force given routes onto a Hugging Face model, or record the model's own; and
log-probabilities under sampling masks.

Works through forward hooks on the routers, so the model is never edited.  A router is any module with `top_k`,
`num_experts` and `weight` whose forward returns (router_logits, router_scores, router_indices), as in transformers 5.
The MoE layers are the routers in module order.

The weights of forced experts come from the current scores by the router's own formula (`capture.routers`), so gradients
reach the router.  The method is rollout routing replay, "R3" (Ma et al. 2025, arXiv:2510.11370).

Shapes: B sequences, S positions, T = B * S tokens, L MoE layers, K top-k, D hidden, E logical experts, V vocabulary, M
ids of the masks of T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from capture.errors import CaptureError, MaskValueError, RouteValueError, UnsupportedRouterError
from capture.routed_experts import RoutedExperts, checked_missing_rows, id_dtype, missing_id
from capture.routers import weights_of
from capture.sampling_mask import SamplingMask

Routes = torch.Tensor | np.ndarray | RoutedExperts

_ROUTER_ATTRIBUTES = ("top_k", "num_experts", "weight")


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of `model` in layer order.

    Raises `UnsupportedRouterError` if it has none, or if they differ in `top_k` or `num_experts`.
    """
    routers = [m for m in model.modules() if all(hasattr(m, name) for name in _ROUTER_ATTRIBUTES)]
    if not routers:
        raise UnsupportedRouterError(f"{type(model).__name__} has no router with {', '.join(_ROUTER_ATTRIBUTES)}")
    if len({(m.top_k, m.num_experts) for m in routers}) > 1:
        raise UnsupportedRouterError(f"the routers of {type(model).__name__} differ in top_k or num_experts")
    return routers


def pad_routes(sequences: Sequence[Routes], num_experts: int, seq_len: int | None = None) -> torch.Tensor:
    """Join one item per sequence to int64 [B, S, L, K] on the CPU, with -1 where there is no row.

    S defaults to the longest item.
    A `RoutedExperts` goes to positions `start ..`; a tensor or array [rows, L, K] to positions `0 ..`.  MISSING is -1
    in signed dtypes; unsigned ones must be `id_dtype(num_experts)`: its maximum is MISSING.  Positions that an item
    does not reach (among them the last one: nothing consumed that token) have no row.  Raises `RouteValueError` if rows
    break the rules of `RoutedExperts`, do not fit into `seq_len`, or differ in L or K.
    """
    if not sequences:
        raise RouteValueError("there are no sequences; give at least one")
    signed = [_signed_ids(item, num_experts) for item in sequences]
    if seq_len is None:
        seq_len = max(start + ids_TLK.shape[0] for ids_TLK, start in signed)
    routes_BSLK = np.full((len(signed), seq_len, *signed[0][0].shape[1:]), -1, dtype=np.int64)
    for row, (ids_TLK, start) in enumerate(signed):
        end = start + ids_TLK.shape[0]
        if ids_TLK.shape[1:] != routes_BSLK.shape[2:] or end > seq_len:
            raise RouteValueError(
                f"sequence {row}: routes {ids_TLK.shape} from position {start} do not fit {routes_BSLK.shape[1:]}"
            )
        routes_BSLK[row, start:end] = ids_TLK
    return torch.from_numpy(routes_BSLK)


class ForcedRoutes:
    """The yield of `force_routes`: how many of the batch's positions are forced, and how many route by themselves.

    The counts are over positions [B, S] and the same for every layer; they are zero until the first forward shows S.
    """

    def __init__(self, routed_ids: Routes | Sequence[Routes], mask: torch.Tensor | None, routers: list[nn.Module]):
        self.forced_positions = 0
        self.own_positions = 0
        router: Any = routers[0]
        self._given_BSLK = pad_routes(_as_sequences(routed_ids), router.num_experts)
        self._mask_BS = None if mask is None else mask.detach().to(device="cpu", dtype=torch.bool)
        self._routes_TLK: torch.Tensor | None = None
        self._forced_T: torch.Tensor | None = None
        self._formula_checked: set[int] = set()
        given, expected = tuple(self._given_BSLK.shape[2:]), (len(routers), router.top_k)
        if given != expected:
            raise RouteValueError(f"routes have (L, K) = {given}, but the model has {expected}")
        if self._mask_BS is not None and (self._mask_BS.ndim != 2 or len(self._mask_BS) != len(self._given_BSLK)):
            raise RouteValueError(
                f"the mask has shape {tuple(self._mask_BS.shape)}, but there are {len(self._given_BSLK)} sequences"
            )

    def hook(self, layer: int) -> Any:
        """Return a forward hook for the router of MoE layer `layer`."""

        def replace(router: Any, _inputs: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits_TE, scores_TK, own_TK = _checked_output(router, output)
            if layer not in self._formula_checked:
                _check_formula(router, logits_TE, scores_TK, own_TK)
                self._formula_checked.add(layer)
            routes_TLK, forced_T = self._for_tokens(own_TK)
            chosen_TK = torch.where(forced_T[:, None], routes_TLK[:, layer], own_TK)
            return logits_TE, weights_of(router, logits_TE, chosen_TK), chosen_TK

        return replace

    def _for_tokens(self, own_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the routes [T, L, K] for a forward over T tokens, and bool [T], true where they must be followed."""
        num_tokens = own_TK.shape[0]
        if self._routes_TLK is None or self._forced_T is None:
            self._routes_TLK = self._spread(num_tokens).to(own_TK.device)
            self._forced_T = self._routes_TLK[:, 0, 0] >= 0
            self.forced_positions = int(self._forced_T.sum())
            self.own_positions = num_tokens - self.forced_positions
        if self._forced_T.shape[0] != num_tokens:
            raise RouteValueError(
                f"a forward has {num_tokens} tokens, but there are routes for {self._forced_T.shape[0]}: "
                "run whole sequences, without a KV cache"
            )
        return self._routes_TLK, self._forced_T

    def _spread(self, num_tokens: int) -> torch.Tensor:
        batch, num_given = self._given_BSLK.shape[:2]
        seq_len, rest = divmod(num_tokens, batch)
        num_masked = seq_len if self._mask_BS is None else self._mask_BS.shape[1]
        if rest or num_given > seq_len or num_masked > seq_len:
            raise RouteValueError(
                f"a forward over {num_tokens} tokens cannot follow routes of {batch} sequences x {num_given} positions"
                f" under a mask of {num_masked}"
            )
        routes_BSLK = self._given_BSLK.new_full((batch, seq_len, *self._given_BSLK.shape[2:]), -1)
        routes_BSLK[:, :num_given] = self._given_BSLK
        if self._mask_BS is not None:
            routes_BSLK[:, :num_masked][~self._mask_BS] = -1
            routes_BSLK[:, num_masked:] = -1
        return routes_BSLK.flatten(0, 1)


class RecordedRoutes:
    """The yield of `record_routes`: the choices in every forward of its context, in order."""

    def __init__(self, num_layers: int) -> None:
        self._calls: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def hook(self, layer: int) -> Any:
        """Return a forward hook for the router of MoE layer `layer`."""

        def record(router: Any, _inputs: Any, output: Any) -> None:
            self._calls[layer].append(_checked_output(router, output)[2].detach().cpu())

        return record

    def ids(self) -> torch.Tensor:
        """Return the recorded choices, int64 [T, L, K] on the CPU, one forward after the other; each has T = B * S.

        Raises `CaptureError` if nothing was recorded or the layers recorded different tokens.
        """
        counts = {tuple(call.shape[0] for call in calls) for calls in self._calls}
        if len(counts) != 1 or counts == {()}:
            raise CaptureError("no forward was recorded, or not every layer took part in each")
        return torch.stack([torch.cat(calls) for calls in self._calls], dim=1)


@contextmanager
def force_routes(
    model: nn.Module, routed_ids: Routes | Sequence[Routes], mask: torch.Tensor | None = None
) -> Iterator[ForcedRoutes]:
    """Make every forward of `model` over the whole batch [B, S] follow `routed_ids` within the context.

    `routed_ids`  tensor or array [B, rows, L, K], or one [rows, L, K] or `RoutedExperts` per sequence; rows <= S, and
                  see `pad_routes` for MISSING.  Positions without a row are routed by the model itself, and counted.
    `mask`        bool [B, <= S]; False (and beyond its end) makes a position route by itself.

    Backward passes that recompute activations (gradient checkpointing) must run inside the context too.  The model is
    restored on exit, also after an exception.  Raises `RouteValueError`, `UnsupportedRouterError`.
    """
    routers = find_routers(model)
    forced = ForcedRoutes(routed_ids, mask, routers)
    with _hooked(routers, forced):
        yield forced


@contextmanager
def record_routes(model: nn.Module) -> Iterator[RecordedRoutes]:
    """Record the choices of `model`'s routers within the context, in the routers' order of experts.

    Inside `force_routes` these are the forced ones.  The model is restored on exit.
    """
    routers = find_routers(model)
    recorded = RecordedRoutes(len(routers))
    with _hooked(routers, recorded):
        yield recorded


def masked_logprobs(
    logits_TV: torch.Tensor, token_ids_T: torch.Tensor, mask: SamplingMask, temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probabilities [T] of sampled tokens among the ids of their masks, which the sampler drew from.

    `logits_TV` of the positions that predict the tokens `token_ids_T`, of any floating-point dtype; the result is
    float32, or float64 for float64.  Gradients reach the logits of the masks' ids.  Raises `MaskValueError` unless the
    mask is of these tokens and of this vocabulary.
    """
    mask.require(token_ids_T.tolist())
    if len(mask.token_ids) and int(mask.token_ids.max()) >= logits_TV.shape[-1]:
        raise MaskValueError(f"token id {int(mask.token_ids.max())} is outside the vocabulary of {logits_TV.shape[-1]}")
    device, dtype = logits_TV.device, torch.promote_types(logits_TV.dtype, torch.float32)
    ids_M = torch.from_numpy(mask.token_ids.astype(np.int64)).to(device)
    counts_T = torch.from_numpy(np.diff(mask.offsets)).to(device)
    token_of_M = torch.arange(len(mask), device=device).repeat_interleave(counts_T)
    values_M = logits_TV[token_of_M, ids_M].to(dtype) / temperature
    lowest_T = torch.full((len(mask),), -torch.inf, dtype=dtype, device=device)
    largest_T = lowest_T.scatter_reduce(0, token_of_M, values_M.detach(), "amax")
    sums_T = torch.zeros_like(largest_T).index_add(0, token_of_M, (values_M - largest_T[token_of_M]).exp())
    is_sampled_M = ids_M == token_ids_T.to(device)[token_of_M]
    return values_M[is_sampled_M] - largest_T - sums_T.log()


@contextmanager
def _hooked(routers: list[nn.Module], observer: ForcedRoutes | RecordedRoutes) -> Iterator[None]:
    with ExitStack() as stack:
        for layer, router in enumerate(routers):
            stack.callback(router.register_forward_hook(observer.hook(layer)).remove)
        yield


def _check_formula(router: Any, logits_TE: torch.Tensor, scores_TK: torch.Tensor, own_TK: torch.Tensor) -> None:
    # Detached: a checkpointed recomputation would otherwise find other saved tensors than the first pass.
    # The tolerance covers bfloat16 and fused kernels; another formula is far outside it.
    ours_TK = weights_of(router, logits_TE.detach(), own_TK)
    if not torch.allclose(ours_TK.float(), scores_TK.detach().float(), rtol=0.02, atol=1e-4):
        raise UnsupportedRouterError(
            f"{type(router).__name__} weighs experts by an unknown formula, so its routes cannot be forced"
        )


def _checked_output(router: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if isinstance(output, tuple) and len(output) == 3:
        logits_TE, scores_TK, ids_TK = output
        if logits_TE.shape[-1] == router.num_experts and scores_TK.shape == ids_TK.shape and ids_TK.ndim == 2:
            return logits_TE, scores_TK, ids_TK
    raise UnsupportedRouterError(f"{type(router).__name__} does not return (logits [T, E], scores [T, K], ids [T, K])")


def _as_sequences(routed_ids: Routes | Sequence[Routes]) -> list[Routes]:
    if isinstance(routed_ids, RoutedExperts):
        return [routed_ids]
    if isinstance(routed_ids, torch.Tensor | np.ndarray) and routed_ids.ndim != 4:
        raise RouteValueError(f"routes of a batch are [B, S, L, K], got {tuple(routed_ids.shape)}")
    return list(routed_ids)


def _signed_ids(item: Routes, num_experts: int) -> tuple[np.ndarray, int]:
    """Return the item as int64 [rows, L, K] with -1 for MISSING, and the position of its first row."""
    if isinstance(item, RoutedExperts):
        if item.num_experts != num_experts:
            raise RouteValueError(f"the routes have {item.num_experts} experts, but the model has {num_experts}")
        return item.signed_ids(), item.start
    array = item.detach().cpu().numpy() if isinstance(item, torch.Tensor) else np.asarray(item)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise RouteValueError(f"routes of a sequence are integers [rows, L, K], got {array.dtype} {array.shape}")
    if array.dtype.kind == "u" and array.dtype != id_dtype(num_experts):
        raise RouteValueError(
            f"{array.dtype} routes cannot mark MISSING among {num_experts} experts; use a signed dtype"
        )
    missing_T = checked_missing_rows(array, num_experts, missing_id(num_experts) if array.dtype.kind == "u" else -1)
    signed = array.astype(np.int64)
    signed[missing_T] = -1
    return signed, 0
