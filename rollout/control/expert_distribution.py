"""The verbs of the load recorder and of the expert map: start, stop, dump, and the locations of experts.

They are answered between two steps, without a turn in the weight verbs' queue, so that all facts of an answer belong to
one moment.  `eplb.load_recorder` counts the loads.
"""

from __future__ import annotations

import msgspec
import torch

from eplb.init_location import RecordedModel
from eplb.load_recorder import LoadRecorder, RecorderMode
from rollout.core.errors import Conflict, TooLarge, UnsupportedFeature
from rollout.core.forward_batch import ForwardBatch
from rollout.core.messages.experts import (
    DumpExpertDistributionReply,
    DumpExpertDistributionReqInput,
    ExpertLoadsReply,
    ExpertLoadState,
    ExpertLocationReply,
    GetExpertLoadsReqInput,
    GetExpertLocationReqInput,
    StartExpertDistributionReply,
    StartExpertDistributionReqInput,
    StopExpertDistributionReply,
    StopExpertDistributionReqInput,
)
from rollout.core.messages.message import ControlReqOutput
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.communicator import Communicator
from rollout.model.model_state import ServingEpoch
from rollout.scheduler.scheduler import Scheduler, VerbHandler


def recorded_model(config: ModelConfig) -> RecordedModel:
    """Return the facts of a model that a dump records.  A placement from a dump is checked against them."""
    return RecordedModel(config.architecture, config.moe_layer_ids, config.num_experts, config.num_experts_per_tok)


class ExpertDistribution:
    """Holder of the recorder, which records while it observes the runner.

    `default_mode` is the mode of a start that names none.
    """

    def __init__(self, scheduler: Scheduler, default_mode: RecorderMode) -> None:
        self._scheduler = scheduler
        self._runner = scheduler.runner
        self._state = scheduler.runner.state
        self._default_mode = default_mode
        self._recorder: LoadRecorder | None = None

    @property
    def verbs(self) -> dict[type, VerbHandler]:
        return {
            StartExpertDistributionReqInput: self._start,
            StopExpertDistributionReqInput: self._stop,
            DumpExpertDistributionReqInput: self._dump,
            GetExpertLoadsReqInput: self._loads,
            GetExpertLocationReqInput: self._location,
        }

    def status(self) -> ExpertLoadState | None:
        """Return the state of the recorder, for metrics; None before the first start."""
        if self._recorder is None:
            return None
        layer_ids = list(self._state.model.config.moe_layer_ids)
        facts = self._recorder.status() | {"recording": self._is_recording, "moe_layer_ids": layer_ids}
        return msgspec.convert(facts, ExpertLoadState)

    @property
    def _is_recording(self) -> bool:
        return self._observe in self._runner.route_observers

    def _observe(self, batch: ForwardBatch, epoch: ServingEpoch, ids_TLK: torch.Tensor) -> None:
        """Record the step of all attention-DP ranks; they call this together."""
        assert self._recorder is not None
        ids_TLK, input_ids, positions = gather_step(batch, ids_TLK, self._state.model.parallel.attn_dp)
        self._recorder.note(ids_TLK, epoch, input_ids, positions)

    def _start(self, verb: StartExpertDistributionReqInput) -> ControlReqOutput[StartExpertDistributionReply]:
        config = self._require_moe()
        mode = verb.mode or self._default_mode
        if self._is_recording:
            assert self._recorder is not None
            if self._recorder.mode != mode:
                raise Conflict(f"already recording in mode {self._recorder.mode}; stop it before mode {mode}")
            return verb.answer(
                StartExpertDistributionReply(mode=mode), "Already recording the expert distribution; nothing changed."
            )
        dropped = 0 if self._recorder is None else self._recorder.num_passes
        placement = self._state.placement
        layers, experts = len(config.moe_layer_ids), config.num_experts
        self._recorder = LoadRecorder(layers, experts, placement, mode, placement.ep_size)
        self._runner.route_observers.append(self._observe)
        reply = StartExpertDistributionReply(mode=mode, num_passes_dropped=dropped)
        return verb.answer(reply, "Start recording the expert distribution.")

    def _stop(self, verb: StopExpertDistributionReqInput) -> ControlReqOutput[StopExpertDistributionReply]:
        self._require_moe()
        if not self._is_recording:
            raise Conflict("the expert distribution is not being recorded")
        recorder = self._require_recorder()
        self._runner.route_observers.remove(self._observe)
        reply = StopExpertDistributionReply(mode=recorder.mode, num_passes=recorder.num_passes)
        return verb.answer(reply, "Stop recording the expert distribution.")

    def _dump(self, verb: DumpExpertDistributionReqInput) -> ControlReqOutput[DumpExpertDistributionReply]:
        config = self._require_moe()
        recorder = self._require_recorder()
        dump = recorder.dump(recorded_model(config).to_header())
        if verb.max_numbers is not None and dump.num_numbers > verb.max_numbers:
            raise TooLarge(f"the dump has {dump.num_numbers} numbers, too many for JSON: take format safetensors")
        if verb.reset:
            recorder.reset()
        return verb.answer(DumpExpertDistributionReply(dump=dump.to_message()), "Dump the expert distribution.")

    def _loads(self, verb: GetExpertLoadsReqInput) -> ControlReqOutput[ExpertLoadsReply]:
        self._require_moe()
        num_passes, loads_LE = self._require_recorder().expert_loads(verb.window)
        return verb.answer(ExpertLoadsReply(num_passes=num_passes, expert_loads=loads_LE.tolist()), "")

    def _location(self, verb: GetExpertLocationReqInput) -> ControlReqOutput[ExpertLocationReply]:
        self._require_moe()
        placement, epoch = self._state.placement, self._state.epoch
        metadata = placement.metadata
        return verb.answer(
            ExpertLocationReply(
                placement_epoch=placement.epoch,
                weight_version=epoch.weight_version,
                weight_epoch=epoch.weight_epoch,
                ep_size=placement.ep_size,
                num_logical_experts=metadata.num_logical_experts,
                num_physical_experts=metadata.num_physical_experts,
                moe_layer_ids=list(self._state.model.config.moe_layer_ids),
                physical_to_logical_map=metadata.physical_to_logical_map.tolist(),
                logical_to_physical_map=placement.slots_of_experts().tolist(),
            )
        )

    def _require_moe(self) -> ModelConfig:
        config = self._state.model.config
        if not config.is_moe:
            raise UnsupportedFeature(f"{config.architecture} has no experts")
        return config

    def _require_recorder(self) -> LoadRecorder:
        if self._recorder is None:
            raise Conflict("nothing was recorded: POST /start_expert_distribution_record first")
        return self._recorder


def gather_step(
    batch: ForwardBatch, ids_TLK: torch.Tensor, ranks: Communicator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather the step of all attention-DP ranks, one after the other: logical ids [T, L, K], input ids and positions
    [T].

    `ranks`: one of each DP rank.
    """
    if batch.global_num_tokens is None:
        return ids_TLK, batch.input_ids, batch.positions
    columns = [batch.input_ids.unsqueeze(1), batch.positions.unsqueeze(1), ids_TLK.flatten(1)]
    gathered = ranks.all_gather_rows(torch.cat(columns, dim=1), batch.global_num_tokens)
    return gathered[:, 2:].to(ids_TLK.dtype).unflatten(1, ids_TLK.shape[1:]), gathered[:, 0], gathered[:, 1]
