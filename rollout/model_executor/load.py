"""Cold load: from a checkpoint folder to a model, through the same path as a live refresh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from eplb.placement import ExpertPlacement
from rollout.core.errors import StartupError
from rollout.core.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.kernels.ops import Ops
from rollout.layers.moe.dispatchers.select import MoeBackend
from rollout.model_executor.checkpoint import open_checkpoint, read_tensors
from rollout.model_executor.decoder import DecoderForCausalLM
from weight_sync.errors import WeightSyncError
from weight_sync.loading import WeightLedger, load_weights, split_wire
from weight_sync.staging import DirectSink

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


def load_model(
    model_path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    placement: ExpertPlacement,
    ops: Ops,
    progress: Progress | None = None,
    parallel: Parallel | None = None,
    moe_backend: MoeBackend | None = None,
) -> DecoderForCausalLM:
    """Build the model of `config` and fill every weight of this rank from `model_path`, cast to `dtype`.

    `parallel` is this rank's view, of an engine of one rank by default; `placement` is of the same rank.  Names, shapes
    and coverage are checked before any tensor is read.  Raises `StartupError` in one line.
    """
    model = DecoderForCausalLM(config, dtype, device, placement, ops, parallel, moe_backend)
    shards = open_checkpoint(model_path)
    metas = [meta for shard in shards for meta in shard.metas]
    total = sum(meta.nbytes for meta in metas)
    try:
        announced = WeightLedger(model.weights.metas())
        for meta, pieces in zip(metas, split_wire(model.weights, metas, cast=True), strict=True):
            for piece in pieces:
                announced.record(meta.name, piece.name)
        announced.settle()
        ledger, sink, done = WeightLedger(model.weights.metas()), DirectSink(model.weights), 0
        for shard in shards:
            for name, tensor in read_tensors(shard):
                load_weights(model.weights, [(name, tensor)], sink, ledger, cast=True)
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total)
        ledger.settle()
    except WeightSyncError as error:
        raise StartupError(f"{model_path} does not fit its config.json: {error}") from None
    model.weights.recompute_derived()
    return model
