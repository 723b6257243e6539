"""Bodies of the native and control endpoints, as pydantic models; these are what /openapi.json shows.

Knows names, types and defaults.  Does not check values against a model: `TokenizerManager` and the scheduler do.

Rules for all bodies: unknown fields are ignored, null means the default, numeric strings count as numbers (but not as
token ids), and a field that asks for a feature this server lacks is refused, not ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from rollout.tokenizer_manager.request import MAX_EXTRA_KEY_CHARS, GenerateReqInput, RoutesFormat

TokenId = Annotated[int, Field(strict=True)]
TokenIds = list[TokenId]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what messages and tensors hold
Size = Annotated[int, Field(ge=0, lt=2**63)]
ExtraKey = Annotated[str, Field(max_length=MAX_EXTRA_KEY_CHARS)]

UNSUPPORTED_GENERATE_FIELDS = frozenset(
    {
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "return_hidden_states",
        "return_indexer_topk",
        "return_sampling_mask",
        "return_entropy",
        "return_flat_raw_top_logprobs",
        "return_flat_raw_output_top_logprobs",
        "replay_routed_experts",
        "session_params",
        "lora_path",
        "custom_logit_processor",
    }
)
UNSUPPORTED_SAMPLING_FIELDS = frozenset({"json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "beam_width"})


def _fail_fast(node: Any) -> None:
    """Set what `pydantic.FailFast` sets, on every list and object in a schema."""
    if isinstance(node, dict):
        if node.get("type") in ("list", "dict"):
            node["fail_fast"] = True
        for part in node.values():
            _fail_fast(part)
    elif isinstance(node, list | tuple):
        for part in node:
            _fail_fast(part)


class Body(BaseModel):
    """Base of every request body.  `unsupported` names fields that are refused when they hold a true value.

    A list is looked at up to its first bad element: pydantic would keep an error, hundreds of bytes, for each.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    unsupported: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, raw: Any) -> Any:
        return {key: value for key, value in raw.items() if value is not None} if isinstance(raw, dict) else raw


class GenerateRequest(Body):
    """POST /generate.  Lists of prompts make a batch; other fields then take one value or a list."""

    unsupported = UNSUPPORTED_GENERATE_FIELDS

    text: str | list[str] | None = None
    input_ids: Annotated[TokenIds | list[TokenIds] | None, Field(union_mode="left_to_right")] = None
    rid: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = {}
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: Annotated[TokenIds | list[TokenIds | None] | None, Field(union_mode="left_to_right")] = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    return_routed_experts: bool | None = None
    routed_experts_start_len: int = 0
    routed_experts_format: RoutesFormat = "compatible"
    return_prompt_token_ids: bool = False
    extra_key: ExtraKey | None = None
    cache_salt: ExtraKey | None = None
    max_kv_version_lag: int | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None  # its old name

    def to_request(self) -> GenerateReqInput:
        others = ("cache_salt", "data_parallel_rank")
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in others}
        if self.routed_dp_rank is None:
            fields["routed_dp_rank"] = self.data_parallel_rank
        return GenerateReqInput(**fields | {"extra_key": combined_extra_key(self.cache_salt, self.extra_key)})


def combined_extra_key(cache_salt: str | None, extra_key: str | None) -> str | None:
    """Both partition the prefix cache; two requests share a prefix only if both agree."""
    if cache_salt is None:
        return extra_key
    return f"{cache_salt}\x1f{extra_key or ''}"


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[TokenIds | list[TokenIds], Field(union_mode="left_to_right")]
    skip_special_tokens: bool = True


# --- control -----------------------------------------------------------------------------------------------------


class EmptyRequest(Body):
    """An endpoint whose body says nothing."""


class AbortRequest(Body):
    rid: str | list[str] = ""
    abort_all: bool = False


class PauseGenerationRequest(Body):
    mode: Literal["abort", "retract", "in_place", "wait"] = "abort"


class ContinueGenerationRequest(Body):
    abort_below_weight_version: str | None = None


class MemoryOccupationRequest(Body):
    """Release or resume; null or empty: every tag to which it applies."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class StartExpertDistributionRequest(Body):
    mode: Literal["stat", "per_pass", "per_token"] | None = None


class DumpExpertDistributionRequest(Body):
    """POST /dump_expert_distribution_record.  `path` is on the server's machine and must not exist."""

    format: Literal["json", "safetensors"] | None = None
    path: str | None = Field(default=None, min_length=1)
    reset: bool = True


class EplbRebalanceRequest(Body):
    """POST /eplb_rebalance.  `physical_to_logical_map` and `split` as `lockstep eplb-plan --output` writes them."""

    dry_run: bool = False
    algorithm: str | None = None
    layers_per_chunk: int | None = Field(default=None, ge=1, lt=2**63)
    most_stall_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    physical_to_logical_map: list[list[Int64]] | None = None
    split: list[list[float]] | None = None


class InitWeightsUpdateGroupRequest(Body):
    master_address: str
    master_port: int = Field(ge=0, le=65535)
    rank_offset: int = Field(ge=0, lt=2**31)
    world_size: int = Field(ge=1, lt=2**31)
    group_name: str = "weight_update_group"
    backend: str | None = None


class DestroyWeightsUpdateGroupRequest(Body):
    group_name: str = "weight_update_group"


class ManifestEntryBody(Body):
    name: str
    dtype: str
    shape: list[Size]
    fingerprint: str | None = None


class OfUpdateRequest(Body):
    """A call that may say to which weight update it belongs."""

    update_id: str | None = Field(default=None, min_length=1, max_length=64)


class BeginWeightUpdateRequest(OfUpdateRequest):
    weight_version: str | None = None
    coverage: Literal["full", "partial"] = "full"
    manifest: list[ManifestEntryBody] | None = None
    base_version: str | None = None
    base_digest: str | None = Field(default=None, pattern="^[0-9a-fA-F]{64}$")
    lease_s: float | None = Field(default=None, gt=0, le=86400)
    placement_epoch: Size | None = None
    adopt_placement: bool | None = None
    selector: Literal["all", "target"] = "all"


class EndWeightUpdateRequest(OfUpdateRequest):
    phase: Literal["verify", "commit"] | None = None


class AbortWeightUpdateRequest(OfUpdateRequest):
    pass


class BucketAddress(OfUpdateRequest):
    """Where a broadcast bucket belongs: what is read first of a body that is wrong elsewhere."""

    group_name: str = "weight_update_group"
    weight_version: str | None = None


class UpdateWeightsFromDistributedRequest(BucketAddress):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[Size]]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    selector: Literal["all", "target"] = "all"


class UpdateWeightsFromIPCRequest(OfUpdateRequest):
    zmq_handles: dict[str, str]
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    selector: Literal["all", "target"] = "all"


class UpdateWeightsFromDiskRequest(OfUpdateRequest):
    """POST /update_weights_from_disk.  The fields from `is_async` on are SGLang's and change nothing here."""

    model_path: str = Field(min_length=1)
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    selector: Literal["all", "target"] = "all"


class PullWeightsRequest(OfUpdateRequest):
    """POST /pull_weights, as slime and miles send it; the last two fields are our own."""

    local_checkpoint_dir: str = Field(min_length=1)
    source_dir: str = Field(min_length=1)
    target_version: Size
    update_memory: bool = False
    weight_version: str | None = None


class UpdateWeightsFromTensorRequest(OfUpdateRequest):
    serialized_named_tensors: list[str] | None = None
    load_format: str | None = None
    format: Literal["safetensors"] | None = None
    shm_name: str | None = None
    shm_bytes: int | None = Field(default=None, ge=8, lt=2**48)
    shm_unlink: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    selector: Literal["all", "target"] = "all"


class UpdateWeightVersionRequest(OfUpdateRequest):
    new_version: str = Field(min_length=1)
    abort_all_requests: bool = True


class GetWeightsByNameRequest(Body):
    name: str
    truncate_size: int = Field(default=100, ge=0, lt=2**31)


class WeightsCheckerRequest(Body):
    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    keep_content: bool = False
    skip_tensor_list: list[str] | None = None
    allow_quant_error: bool = False
    selector: Literal["all", "target"] = "all"
