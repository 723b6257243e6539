"""Bodies of the native endpoints, as pydantic models, and the base of all bodies; /openapi.json shows them.

Bodies of control verbs are made from the verbs' declarations, see `verb_body`.  Values are not checked against a model
here: `TokenizerManager` and the scheduler do that.

Rules for all bodies: unknown fields are ignored and named in the answer (see `unknown_fields`), null means the default,
numeric strings count as numbers (but not as token ids), and a field that asks for a feature this server lacks is
refused, not ignored.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema

from rollout.core.errors import BadRequest, TooLarge, UnsupportedFeature
from rollout.core.known_fields import (
    HARMLESS_FIELDS,
    MEDIA_FIELDS,
    MOST_IGNORED,
    UNSUPPORTED_GENERATE_FIELDS,
    UNSUPPORTED_SAMPLING_FIELDS,
    VLLM_SAMPLING_FIELDS,
    shown,
)
from rollout.core.messages.message import Int64, UpdateId
from rollout.core.sampling_params import SamplingLogprobsMode
from rollout.tokenizer_manager.request import MAX_EXTRA_KEY_CHARS, GenerateReqInput, LogprobsFormat, RoutesFormat

TokenId = Annotated[int, Field(strict=True)]
TokenIds = list[TokenId]
ExtraKey = Annotated[str, Field(max_length=MAX_EXTRA_KEY_CHARS)]


class UnknownField(NamedTuple):
    """The `path` of an unknown field, and the names that are known in its place."""

    path: str
    known: frozenset[str]


MAX_DEPTH = 64
"""Depth of objects and lists in a field without a schema; templates indent them."""
MAX_VALUES = 1 << 16
"""Most values in a field without a schema."""
MAX_MESSAGES = 1 << 16
"""Most messages of a chat."""


def _bounded(value: Any, info: ValidationInfo) -> Any:
    """A field without a schema.  Raises `BadRequest` over `MAX_DEPTH`, and `TooLarge` over `MAX_VALUES`."""
    _check_nested(value, str(info.field_name), MAX_VALUES)
    return value


def _checked_messages(value: Any, info: ValidationInfo) -> Any:
    """Messages of a chat.  Raises `TooLarge` for more than `MAX_MESSAGES`, and `BadRequest` over `MAX_DEPTH`."""
    name = str(info.field_name)
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise TooLarge(f"{name} has {len(value)} messages; the limit is {MAX_MESSAGES}")
    _check_nested(value, name, sys.maxsize)
    return value


def _check_nested(value: Any, name: str, max_values: int) -> None:
    level, depth, count = [value], 0, 0
    while level:
        count += len(level)
        if count > max_values:
            raise TooLarge(f"{name} has over {max_values} values")
        if depth > MAX_DEPTH:
            raise BadRequest(f"{name} is nested more than {MAX_DEPTH} levels deep")
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [part for each in inner for part in (each.values() if isinstance(each, dict) else each)]
        depth += 1


FreeForm = BeforeValidator(_bounded)
"""The validator of a field that holds any JSON."""
Messages = Annotated[list[dict[str, Any]], BeforeValidator(_checked_messages)]
FreeObject = Annotated[dict[str, Any], FreeForm]
Tools = Annotated[list[dict[str, Any]], FreeForm]
BUDGETS = {"thinking_token_budget", "max_thinking_tokens"}
"""Fields in which a 0 asks for something, and a -1 for nothing."""


def _harden(node: Any) -> None:
    """Set on a schema what holds for every body: see `Body`."""
    if isinstance(node, dict):
        kind = node.get("type")
        if kind in ("list", "dict"):
            node["fail_fast"] = True  # what `pydantic.FailFast` sets
        elif kind == "float":
            node["allow_inf_nan"] = False
        elif kind == "int":
            if not node.keys() & {"ge", "gt"}:
                node["ge"] = -(2**63)
            if not node.keys() & {"lt", "le"}:
                node["lt"] = 2**63
        for part in node.values():
            _harden(part)
    elif isinstance(node, list | tuple):
        for part in node:
            _harden(part)


class Body(BaseModel):
    """Base of every request body.  `unsupported` names fields that are refused when they hold a true value.

    `other_names` are of another dialect, refused whatever they hold, with what to ask with instead.  `harmless` ones
    are known and change nothing.  `struct_lists`: fields that are lists of msgspec's structs, by their types: decoded
    as such, they need not be validated again.
    Null means the default.  Integers have at most 64 bits, and numbers are finite, also where they come as text.  A
    list is checked up to its first bad element: pydantic would keep an error, hundreds of bytes, for each.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    unsupported: ClassVar[frozenset[str]] = frozenset()
    struct_lists: ClassVar[dict[str, Any]] = {}
    other_names: ClassVar[dict[str, str]] = {}
    harmless: ClassVar[frozenset[str]] = frozenset()
    _unknown: list[UnknownField] = PrivateAttr(default=[])

    @property
    def unknown(self) -> list[UnknownField]:
        """The unknown fields that it came with."""
        return self._unknown

    @unknown.setter
    def unknown(self, fields: list[UnknownField]) -> None:
        self._unknown = fields

    @property
    def ignored_fields(self) -> list[str]:
        return [shown(field.path) for field in self._unknown]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _harden(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _prepared(cls, raw: Any) -> Any:
        """Return the body without nulls.  Raises `UnsupportedFeature`, also for a body inside a body."""
        if not isinstance(raw, dict):
            return raw
        refuse_unsupported(raw, cls.unsupported)
        for name, ours in cls.other_names.items():
            if raw.get(name) is not None:
                raise UnsupportedFeature(f"{name} is not known here; ask with {ours}")
        return {key: value for key, value in raw.items() if value is not None}


def refuse_unsupported(raw: dict[str, Any], names: frozenset[str], place: str = "") -> None:
    """Raise `UnsupportedFeature` for the first of `names` that holds a true value; `place` begins the message."""
    for name in sorted(names & raw.keys()):
        value = raw[name]
        asks = value is not None and value is not False and value != -1 if name in BUDGETS else value
        if asks:
            raise UnsupportedFeature(f"{place}{name} is not supported by this server")


# --- unknown fields ---------------------------------------------------------------------------------------------------


def unknown_fields(model: type[Body], raw: Mapping[str, Any]) -> list[UnknownField]:
    """Return the first `MOST_IGNORED` unknown fields of a body, also in bodies inside it."""
    return list(itertools.islice(_unknown(model, raw, ""), MOST_IGNORED))


def _unknown(model: type[Body], raw: Mapping[str, Any], place: str) -> Iterator[UnknownField]:
    known = known_names(model)
    for name, value in raw.items():
        if value is not None and name not in known:
            yield UnknownField(place + name, known)
    for name, inner in _inner_bodies(model).items():
        value = raw.get(name)
        if isinstance(value, dict):
            yield from _unknown(inner, value, f"{place}{name}.")
        elif isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, dict):
                    yield from _unknown(inner, each, f"{place}{name}[{index}].")


@functools.cache
def known_names(model: type[Body]) -> frozenset[str]:
    """Names that are honoured, refused by name, or harmless."""
    return frozenset({*model.model_fields, *model.unsupported, *model.other_names, *model.harmless})


@functools.cache
def _inner_bodies(model: type[Body]) -> dict[str, type[Body]]:
    """The fields that hold bodies, or lists of them."""
    found = {name: body_in(item.annotation) for name, item in model.model_fields.items()}
    return {name: inner for name, inner in found.items() if inner is not None}


def body_in(kind: Any) -> type[Body] | None:
    """Return the body that a field of type `kind` holds, also in a list or union; None if it holds none."""
    if isinstance(kind, type) and issubclass(kind, Body):
        return kind
    return next((inner for arm in get_args(kind) if (inner := body_in(arm)) is not None), None)


# --- generation -------------------------------------------------------------------------------------------------


class AnyGeneration(Body):
    """The fields that requests of every dialect have."""

    harmless = HARMLESS_FIELDS

    stream: bool = False
    session_id: str | None = None
    extra_key: ExtraKey | None = None
    cache_salt: ExtraKey | None = None
    max_kv_version_lag: int | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None  # its old name

    def common_fields(self) -> dict[str, Any]:
        """Return fields of a `GenerateReqInput`.  Prefixes are shared only if `cache_salt` and `extra_key` agree."""
        salt, key = self.cache_salt, self.extra_key
        return {
            "stream": self.stream,
            "session_id": self.session_id,
            "extra_key": key if salt is None else f"{salt}\x1f{key or ''}",
            "max_kv_version_lag": self.max_kv_version_lag,
            "ignored_fields": self.ignored_fields,
            "routed_dp_rank": self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank,
        }


class GenerateRequest(AnyGeneration):
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
    return_routed_experts: bool | None = None
    routed_experts_start_len: int = 0
    routed_experts_format: RoutesFormat = "compatible"
    replay_routed_experts: str | dict[str, Any] | list[str | dict[str, Any] | None] | None = None
    replay_routed_experts_start_len: int = 0
    return_prompt_token_ids: bool = False
    return_sampling_mask: bool | list[bool] | None = None
    sampling_logprobs_mode: SamplingLogprobsMode | None = None
    sampling_mask_format: Literal["lists", "csr"] = "lists"
    logprobs_format: LogprobsFormat = "nested"
    priority: Int64 = 0

    def to_request(self) -> GenerateReqInput:
        """Raises `UnsupportedFeature`."""
        params = self.sampling_params
        slime = [_asks_for_top_p_ids(each) for each in (params if isinstance(params, list) else [params])]
        own = type(self).model_fields.keys() - AnyGeneration.model_fields.keys()
        fields = {name: getattr(self, name) for name in own} | self.common_fields()
        if any(slime):
            fields |= {
                "return_sampling_mask": slime if isinstance(params, list) else True,
                "sampling_mask_format": "slime",
            }
        return GenerateReqInput(**fields | {"priority": -self.priority})  # SGLang's higher ones come first


def _asks_for_top_p_ids(params: dict[str, Any]) -> bool:
    """Return whether slime asks for sampling masks in its form; refuse unsupported names."""
    asks = params.get("custom_params") == {"return_top_p_token_ids": True}
    refused = UNSUPPORTED_SAMPLING_FIELDS - {"custom_params"} if asks else UNSUPPORTED_SAMPLING_FIELDS
    refuse_unsupported(params, refused, "sampling_params: ")
    for name, ours in VLLM_SAMPLING_FIELDS.items():
        if params.get(name) is not None and params[name] is not False:
            raise UnsupportedFeature(f"sampling_params: {name} is vLLM's; ask with {ours}")
    return asks


def template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Return a client's variables for the chat template.  Raises `UnsupportedFeature` for what steers the rendering."""
    reserved = {"tokenize", "add_generation_prompt", "continue_final_message", "chat_template", "messages", "tools"}
    refused = reserved & variables.keys()
    if refused:
        raise UnsupportedFeature(f"chat_template_kwargs may not set {', '.join(sorted(refused))}")
    return variables


class TokenizeRequest(Body):
    """POST /tokenize.  The fields from `tools` to `add_generation_prompt` are for messages."""

    unsupported = frozenset({"chat_template", "return_token_strs", "documents", "mm_processor_kwargs"})
    harmless = MEDIA_FIELDS

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: FreeObject = {}
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[TokenIds | list[TokenIds], Field(union_mode="left_to_right")]
    skip_special_tokens: bool | None = None


# --- control -----------------------------------------------------------------------------------------------------


class EmptyRequest(Body):
    """The body of an endpoint that takes nothing from it."""


class RouteProbeRequest(Body):
    """POST /dashboard/route_probe."""

    text: str | None = None
    input_ids: TokenIds | None = None


class AbortRequest(Body):
    rid: str | list[str] = ""
    abort_all: bool = False


class BucketAddress(Body):
    """The address of a broadcast bucket: the fields that are read first of a body that is wrong elsewhere."""

    update_id: UpdateId | None = None
    group_name: str = "weight_update_group"
    weight_version: str | None = None
