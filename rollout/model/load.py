"""Cold load: from a Hugging Face checkpoint folder to a model, through the same path as a live refresh.

Every fault of the folder is found before any tensor is read.  Its error is one line with the file and a remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eplb.placement import ExpertPlacement
from rollout.core.errors import StartupError
from rollout.core.specs.model_config import ModelConfig
from rollout.core.specs.stored_format import StoredFormat
from rollout.distributed.parallel import Parallel
from rollout.kernels.ops import Ops
from rollout.layers.moe.dispatchers.select import MoeBackend
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.kv_scales import layer_and_part
from rollout.model.mtp import MtpHead
from rollout.model.weight_loading import WeightIndex
from weight_sync.assembly import PairedTensors, WireTensor
from weight_sync.bucket import runs_of
from weight_sync.checkpoint_folder import open_checkpoint_folder
from weight_sync.content_check import is_finite
from weight_sync.errors import ContentError, WeightSyncError
from weight_sync.held_format import kept_pair
from weight_sync.intake import Arrival, split_tensors, store
from weight_sync.ledger import WeightLedger
from weight_sync.mxfp4 import Mxfp4Experts, value_metas
from weight_sync.pair_kinds import FP8, INT4
from weight_sync.paired_wire import part_of, whole_metas
from weight_sync.safetensors_file import SafetensorsFile
from weight_sync.splitting import split_wire
from weight_sync.staging import DirectSink
from weight_sync.tensor_meta import LogicalWeights, TensorMeta

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all
POWERS_OF_TWO = torch.float8_e8m0fnu
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
    memory: AbstractContextManager[object] | None = None,
) -> DecoderForCausalLM:
    """Build the model of `config` and fill every weight of this rank from `model_path`, cast to `dtype`.

    `parallel` is this rank's view, of an engine of one rank by default; `placement` is of the same rank.  Names, shapes
    and coverage are checked before any tensor is read.  FP8, INT4 and MXFP4 weights become their values, but for those
    that `ops` hold as they come.  Scales of keys and values are left to `read_kv_scales`.  `memory`: entered while the
    tensors of the weights are made.  Raises `StartupError` in one line.
    """
    with memory or nullcontext():
        model = DecoderForCausalLM(config, dtype, device, placement, ops, parallel, moe_backend)
    _fill(model.weights, model_path, config, progress)
    return model


def load_mtp(
    model_path: str | Path,
    model: DecoderForCausalLM,
    device: torch.device | str,
    ops: Ops,
    moe_backend: MoeBackend | None = None,
    memory: AbstractContextManager[object] | None = None,
) -> MtpHead:
    """Build the layer that predicts one token further for `model`, and fill its weights from the model's folder.

    The checkpoint's copies of the embedding and of the output head are left out, as the layer uses the model's own.
    `memory`: see `load_model`.
    Raises `StartupError` in one line, also if the model has no such layer or the folder has no tensors of it.
    """
    with memory or nullcontext():
        head = MtpHead(model, device, ops, moe_backend)
    prefix = head.spec.prefix
    if not any(meta.name.startswith(prefix) for shard in open_checkpoint(model_path) for meta in shard.metas):
        raise StartupError(
            f"{model_path} has no tensors {prefix}*, the layer that predicts several tokens at once: "
            "copy them from the published checkpoint, or start without --speculative-algorithm"
        )
    _fill(head.weights, model_path, model.config, None, prefix)
    return head


def _fill(
    weights: WeightIndex, model_path: str | Path, config: ModelConfig, progress: Progress | None, prefix: str = ""
) -> None:
    """Fill all weights from the tensors of a folder whose names begin with `prefix`.  Raises `StartupError`."""
    shards = open_checkpoint(model_path)

    def is_wanted(name: str) -> bool:
        return name.startswith(prefix) and layer_and_part(name, config.renamed_prefixes) is None

    metas = [_widened(meta) for shard in shards for meta in shard.metas if is_wanted(meta.name)]
    total = sum(meta.nbytes for meta in metas)
    try:
        _check(weights, metas, config.stored_format)
        ledger, sink, done = WeightLedger(weights.metas()), DirectSink(weights), 0
        reader = _Reader(weights)
        for shard in shards:
            for name, tensor in read_tensors(shard):
                if not is_wanted(name):
                    continue
                for each in reader.take(name, tensor):
                    store(reader.arrivals(each, ledger), sink, ledger)
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total)
        ledger.settle()
    except WeightSyncError as error:
        raise StartupError(f"{model_path} does not fit its config.json: {error}") from None
    weights.recompute_derived()


class _Reader:
    """A converter of what a checkpoint stores, in any order, to what the model holds."""

    def __init__(self, weights: WeightIndex) -> None:
        self._weights, self._formats = weights, weights.held_formats()
        self._mxfp4, self._pairs = Mxfp4Experts(weights), PairedTensors(weights, at_start=True)

    def take(self, name: str, tensor: torch.Tensor) -> Iterator[WireTensor]:
        """Yield the tensors that are whole now.  Raises `ContentError` for quantised values that are not finite."""
        for each in self._pairs.take(self._mxfp4.take(name, tensor)):
            if each.pair is not None and not is_finite(each.content):
                raise ContentError(f"values that are not finite in {each.name}")
            yield each

    def arrivals(self, tensor: WireTensor, ledger: WeightLedger) -> list[Arrival]:
        """Return the logical tensors in a tensor, as they are held.  Raises as `split_tensors` and `kept_pair`."""
        found = split_tensors(self._weights, [(tensor.name, tensor.content)], ledger, cast=True)
        return [
            arrival._replace(pair=kept_pair(arrival.piece, tensor.name, tensor.pair, self._formats.get(arrival.name)))
            for arrival in found
        ]


def _check(weights: LogicalWeights, metas: Sequence[TensorMeta], stored_format: StoredFormat) -> None:
    """Check that a checkpoint's tensors are the model's, all of them, in the format that its `config.json` states.

    Raises `WeightSyncError`.
    """
    parts = ((meta, part_of(weights, meta)) for meta in reversed(metas))
    first = {part.kind.label: meta.name for meta, part in parts if part is not None and part.is_first}
    if FP8.label in first and stored_format != "fp8":
        raise ContentError(
            f"{first[FP8.label]} is float8_e4m3fn, but there is no quantization_config with the size of its blocks"
        )
    if INT4.label in first and stored_format != "int4":
        raise ContentError(f"{first[INT4.label]} is in INT4, but the quantization_config does not say so")
    values, announced = whole_metas(weights, value_metas(metas)), WeightLedger(weights.metas())
    for meta, pieces in zip(values, split_wire(weights, values, cast=True), strict=True):
        for piece in pieces:
            announced.record(meta.name, piece.name)
    announced.settle()


def _widened(meta: TensorMeta) -> TensorMeta:
    """Return a tensor of a checkpoint as `read_tensors` reads it: scales that are powers of two become float32."""
    return meta._replace(dtype=torch.float32) if meta.dtype == POWERS_OF_TWO else meta


def quantised_names(model_path: str | Path, weights: LogicalWeights) -> frozenset[str]:
    """Return the names of the logical tensors that a checkpoint stores quantised.

    Raises `StartupError`, also if there are none.
    """
    metas = [meta for shard in open_checkpoint(model_path) for meta in shard.metas]
    parts = ((meta, part_of(weights, meta)) for meta in metas)
    quantised = (meta for meta, part in parts if part is not None and part.kind is FP8 and part.is_first)
    names = frozenset(piece.name for meta in quantised for piece in weights.split(meta))
    if not names:
        raise StartupError(f"--quantize-weight-updates needs FP8 tensors, but {model_path} has none")
    return names


def open_checkpoint(model_path: str | Path) -> tuple[SafetensorsFile, ...]:
    """Open the files of a checkpoint folder and read their headers.

    Raises `StartupError` when there is no safetensors file, or a file that the index names is missing.  It is also
    raised when a file is truncated or lacks a tensor that the index puts there, or a tensor lies in two files.
    """
    try:
        return open_checkpoint_folder(Path(model_path)).files
    except ContentError as error:
        raise StartupError(f"{error}; copy it again") from None
    except WeightSyncError as error:
        raise StartupError(str(error)) from None


def read_tensors(file: SafetensorsFile) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of one file, on the CPU, in the order of their content.  Raises `StartupError`.

    A tensor is a view of the mapped file; scales that are powers of two are widened.  The mapping is renewed now and
    then.  Otherwise the part that was read would count as resident until the whole file is read, in addition to the
    weights made from it.
    """
    try:
        for metas in runs_of(file.metas, MAPPED_BYTES):
            with safe_open(file.path, framework="pt") as mapped:
                for meta in metas:
                    tensor = mapped.get_tensor(meta.name)
                    yield meta.name, tensor.float() if meta.dtype == POWERS_OF_TWO else tensor
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file.path} is truncated or damaged ({error}); copy it again") from None
