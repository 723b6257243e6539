"""Cold load: from a Hugging Face checkpoint folder to a model, through the same path as a live refresh.

Every fault of the folder is found before any tensor is read, and is one line that names the file and says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eplb.placement import ExpertPlacement
from rollout.core.errors import StartupError
from rollout.core.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.kernels.ops import Ops
from rollout.layers.moe.dispatchers.select import MoeBackend
from rollout.model_executor.decoder import DecoderForCausalLM
from weight_sync.bucket import runs_of
from weight_sync.checkpoint_folder import open_checkpoint_folder
from weight_sync.errors import ContentError, WeightSyncError
from weight_sync.loading import WeightLedger, load_weights, split_wire
from weight_sync.mxfp4 import Mxfp4Experts, value_metas
from weight_sync.safetensors_file import SafetensorsFile
from weight_sync.staging import DirectSink

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all
MAPPED_BYTES = 256 * 2**20  # read from one mapping of a file


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
    and coverage are checked before any tensor is read.  MXFP4 weights become their values.  Raises `StartupError` in
    one line.
    """
    model = DecoderForCausalLM(config, dtype, device, placement, ops, parallel, moe_backend)
    shards = open_checkpoint(model_path)
    metas = [meta for shard in shards for meta in shard.metas]
    total = sum(meta.nbytes for meta in metas)
    try:
        announced, values = WeightLedger(model.weights.metas()), value_metas(metas)
        for meta, pieces in zip(values, split_wire(model.weights, values, cast=True), strict=True):
            for piece in pieces:
                announced.record(meta.name, piece.name)
        announced.settle()
        ledger, sink, done = WeightLedger(model.weights.metas()), DirectSink(model.weights), 0
        experts = Mxfp4Experts(model.weights)
        for shard in shards:
            for name, tensor in read_tensors(shard):
                for named in experts.take(name, tensor):
                    load_weights(model.weights, [named], sink, ledger, cast=True)
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total)
        ledger.settle()
    except WeightSyncError as error:
        raise StartupError(f"{model_path} does not fit its config.json: {error}") from None
    model.weights.recompute_derived()
    return model


def open_checkpoint(model_path: str | Path) -> tuple[SafetensorsFile, ...]:
    """The files of a checkpoint folder, headers read.

    Raises `StartupError` when there is no safetensors file, one that the index names is missing, one is truncated or
    lacks a tensor that the index puts there, or a tensor lies in two of them.
    """
    try:
        return open_checkpoint_folder(Path(model_path)).files
    except ContentError as error:
        raise StartupError(f"{error}; copy it again") from None
    except WeightSyncError as error:
        raise StartupError(str(error)) from None


def read_tensors(file: SafetensorsFile) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of one file, on the CPU, in the order of their content.  Raises `StartupError`.

    A tensor is a view of the mapped file.  The mapping is renewed now and then: what was read of it would otherwise
    count as resident, beside the weights made from it, until the whole file is read.
    """
    try:
        for metas in runs_of(file.metas, MAPPED_BYTES):
            with safe_open(file.path, framework="pt") as mapped:
                for meta in metas:
                    yield meta.name, mapped.get_tensor(meta.name)
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file.path} is truncated or damaged ({error}); copy it again") from None
