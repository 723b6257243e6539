"""A generation request as it comes in, and its expansion into one message to the scheduler per prompt.

What depends on the model or the server is checked in `validation.py`.

    rid given     one prompt, n = 1    batch             one prompt, n > 1    batch, n > 1
    "r"           r                    r_0, r_1, ...     r_0, r_1, ...        r_0_0, r_0_1, ..., r_1_0, ...
    ["a", "b"]    -                    a, b              -                    a_0, a_1, ..., b_0, ...

Every id in this table, and the ids that stand for a whole group (r, r_0, a), can be aborted.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rollout.core.continued import continued_params, continued_seed
from rollout.core.errors import BadRequest, TooLarge
from rollout.core.known_fields import (
    HARMLESS_SAMPLING_FIELDS,
    KNOWN_SAMPLING_FIELDS,
    MAX_IGNORED,
    shown,
    unknown_field,
)
from rollout.core.messages.hidden import HiddenStatesParams
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.messages.pooling import PoolingParams
from rollout.core.sampling_params import MAX_N, SamplingLogprobsMode, SamplingParams, sampling_params_from_dict

logger = logging.getLogger(__name__)

MAX_BATCH = 4096
"""Prompts in one request."""
MAX_SAMPLES = 8192
"""Prompts times n in one request."""
MAX_TOKEN_IDS_LOGPROB = 4096
FILL_CONTEXT = 1 << 31
"""A number of tokens that is more than any context holds."""
MAX_LOGGED_NAMES = 256
"""Names of unknown fields in the log: they come from clients."""
MAX_RID_CHARS = 512
MAX_SESSION_ID_CHARS = 512
MAX_EXTRA_KEY_CHARS = 512
"""Limit of `extra_key` and of `cache_salt`: the prefix cache keeps them."""

RoutesFormat = Literal["compatible", "compact", "npy", "dict", "packed"]
MaskFormat = Literal["lists", "csr", "slime"]
LogprobsFormat = Literal["nested", "compact"]
HiddenFormat = Literal["nested", "compact"]
HiddenForm = Literal["rows", "layers", "compact"]
"""Lists of rows, of the rows of each layer, or bytes."""


@dataclass(kw_only=True)
class GenerateReqInput:
    """One call, of one prompt or a batch.  Names and meaning are as in SGLang's /generate.

    Exactly one of `text` and `input_ids` is set; a list of prompts makes a batch, and lists in the other fields then
    give one value per prompt.  `return_routed_experts` None leaves the choice to the server's default.
    `return_sampling_mask`: the ids that top-k, top-p and min-p left at each token; None leaves it to the server's
    default, which is for requests that have one of the three.  `sampling_params.custom_params.return_top_p_token_ids`
    asks for them in slime's form.
    `replay_routed_experts`: routes that take the place of the routers' choices, in a wire form of `replay.py`.
    `max_kv_version_lag`: commits that its KV may be behind, -1 for any number; None leaves it to the server's setting.
    `stream_rows`: the answers of its stream have the versions and the routes of their tokens.
    `priority`: waiting requests are admitted from the lowest on, equal priorities in the order of their arrival.
    `routed_dp_rank`: the data-parallel rank that runs it; None: the least loaded one.
    `session_id`: the session that the request belongs to; its prefix may be kept, and the reply repeats the id.
    `ignored_fields`: the unknown fields that it came with; the answer names them.
    `is_reformed`: its answer becomes one of another dialect.
    `kept_special_tokens`: special tokens that the text holds even where `sampling_params` skip the others.
    `is_binary`: its answer is msgpack with arrays, see `binary_response`.
    `model`: the name of the base model or of an adapter, and `lora_path`: the name of an adapter, None for neither.
    `hidden`: "logprobs" or "routes" that the server records for itself, and that the answer does not show.
    `pooling`: rows of the prompt's hidden states are wanted, and no tokens.
    `return_hidden_states`: hidden states of `hidden_state_layers`, by default after the final norm, of the tokens from
    position `hidden_states_start_len` on.
    `prior_output_tokens`: this many of the last ids of a prompt are output of an earlier request, whose budget and seed
    go on.
    `default_new_tokens`: where `sampling_params` name no `max_new_tokens`, this many, or as many as the context holds.
    """

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    rid: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int] | list[list[int] | None] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    stream_rows: bool = False
    return_routed_experts: bool | None = None
    routed_experts_start_len: int = 0
    routed_experts_format: RoutesFormat = "compatible"
    replay_routed_experts: Any = None
    replay_routed_experts_start_len: int = 0
    return_prompt_token_ids: bool = False
    return_sampling_mask: bool | list[bool] | None = None
    sampling_logprobs_mode: SamplingLogprobsMode | None = None
    sampling_mask_format: MaskFormat = "lists"
    logprobs_format: LogprobsFormat = "nested"
    return_hidden_states: bool | list[bool] = False
    hidden_state_layers: list[int] | None = None
    hidden_states_start_len: int = 0
    hidden_states_format: HiddenFormat = "nested"
    model: str | None = None
    lora_path: str | list[str | None] | None = None
    extra_key: str | None = None
    max_kv_version_lag: int | None = None
    priority: int = 0
    routed_dp_rank: int | None = None
    session_id: str | None = None
    ignored_fields: list[str] = field(default_factory=list)
    is_reformed: bool = False
    is_binary: bool = False
    kept_special_tokens: tuple[str, ...] = ()
    default_new_tokens: int | None = None
    prior_output_tokens: int | list[int] = 0
    hidden: frozenset[str] = frozenset()
    pooling: PoolingParams | None = None

    @property
    def texts(self) -> list[str]:
        """The prompts that came as text: all of them, or none."""
        if self.text is None:
            return []
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def hidden_form(self) -> HiddenForm:
        """The form of hidden states in the answer."""
        if self.hidden_states_format == "compact" or self.is_binary:
            return "compact"
        return "rows" if self.hidden_state_layers is None else "layers"


@dataclass(frozen=True, slots=True)
class ExpandedRequest:
    """The messages of a request to the scheduler, one for each prompt and all its samples, and what completes them.

    Lists run parallel to `messages`.  `names`: the id of each prompt, and of the group of its samples.  `lengths`: the
    number of tokens to generate where the caller named none, up to the end of the context; else None.  `replays`: the
    routes to read, as they came.  `replies_with_list`: the reply to a batch or n > 1 is a list, prompt by prompt, even
    of length 1.
    """

    rid: str | None  # of the whole batch, where one was given
    names: list[str]
    messages: list[TokenizedGenerateReqInput]
    lengths: list[int | None]
    replays: list[Any]
    replies_with_list: bool
    unknown_sampling_keys: list[str]


def sample_rids(message: TokenizedGenerateReqInput) -> list[str]:
    """Return the id of each sample of a message."""
    return [message.rid, *(rid for rid, _ in message.siblings)]


_SHARED = (
    *("stream", "stream_rows", "routed_experts_start_len", "extra_key"),
    *("max_kv_version_lag", "priority", "session_id", "pooling"),
)
"""Options that a prompt's message takes as they are; those in `_PER_PROMPT` can be a list, of one for each prompt."""
_PER_PROMPT = ("return_logprob", "logprob_start_len", "top_logprobs_num")


def expand(
    request: GenerateReqInput, *, routes_by_default: bool = False, masks_by_default: bool = False
) -> ExpandedRequest:
    """Return one message for each prompt, in order; prompts that come as text have no token ids yet.

    Raises `BadRequest` for no prompt, two kinds of prompt, lists of the wrong length or bad sampling parameters;
    `TooLarge` over a cap.
    """
    _check_shared(request)
    ids, is_batch = _prompts(request)
    count = len(ids)
    if count > MAX_BATCH:
        raise TooLarge(f"a request holds at most {MAX_BATCH} prompts, got {count}")
    rids = _prompt_rids(request.rid, count, is_batch)
    earlier = _earlier_counts(request, ids, is_batch)
    raw_params: list[dict[str, Any]] = _column("sampling_params", request.sampling_params, count, is_batch)
    replays = _column("replay_routed_experts", request.replay_routed_experts, count, is_batch)
    columns = {name: _column(name, getattr(request, name), count, is_batch) for name in _PER_PROMPT}
    columns["lora_name"] = _column("lora_path", request.lora_path, count, is_batch)
    columns["token_ids_logprob"] = _token_ids_column(request.token_ids_logprob, count, is_batch)
    shared = {name: getattr(request, name) for name in _SHARED}
    shared["return_routed_experts"] = (
        routes_by_default if request.return_routed_experts is None else request.return_routed_experts
    )
    given, unknown = _sampling_params(raw_params)
    budgets = [None if raw.get("max_new_tokens") is not None else request.default_new_tokens for raw in raw_params]
    params = [_continued(*each) for each in zip(given, earlier, budgets)]
    columns["return_sampling_mask"] = [
        masks_by_default and each.filters if asked is None else asked
        for asked, each in zip(_column("return_sampling_mask", request.return_sampling_mask, count, is_batch), params)
    ]
    shared["sampling_logprobs_mode"] = request.sampling_logprobs_mode or "selected"
    layers = (-1,) if request.hidden_state_layers is None else tuple(request.hidden_state_layers)
    hidden = HiddenStatesParams(layers=layers, start=request.hidden_states_start_len)
    columns["hidden_states"] = [
        hidden if asked else None
        for asked in _column("return_hidden_states", request.return_hidden_states, count, is_batch)
    ]
    messages, lengths = [], []
    for index, rid in enumerate(rids):
        first, *siblings = _samples(rid, given[index], earlier[index])
        own = {name: column[index] for name, column in columns.items()}
        messages.append(
            TokenizedGenerateReqInput(
                rid=first[0],
                input_ids=ids[index],
                sampling_params=params[index],
                siblings=siblings,
                **shared,
                **own,
            )
        )
        lengths.append(budgets[index] if not earlier[index] or budgets[index] is None else params[index].max_new_tokens)
    group = request.rid if is_batch and isinstance(request.rid, str) else None
    return ExpandedRequest(group, rids, messages, lengths, replays, is_batch or params[0].n > 1, unknown)


def _check_shared(request: GenerateReqInput) -> None:
    lag = request.max_kv_version_lag
    if lag is not None and not -1 <= lag < 2**31:
        raise BadRequest(f"max_kv_version_lag must be -1 (no limit) or in 0..{2**31 - 1}, got {lag}")
    if request.session_id is not None and not 0 < len(request.session_id) <= MAX_SESSION_ID_CHARS:
        raise BadRequest(f"a session id must have 1 to {MAX_SESSION_ID_CHARS} characters")
    if request.extra_key is not None and "\x00" in request.extra_key:
        raise BadRequest("extra_key and cache_salt must not hold the character 0")
    if request.sampling_logprobs_mode is not None and not request.return_sampling_mask:
        raise BadRequest("sampling_logprobs_mode needs return_sampling_mask")
    if request.logprobs_format == "compact" and request.return_text_in_logprobs:
        raise BadRequest("logprobs_format compact holds no text: leave out return_text_in_logprobs")
    if request.hidden_state_layers is not None and not request.return_hidden_states:
        raise BadRequest("hidden_state_layers needs return_hidden_states")
    if not 0 <= request.replay_routed_experts_start_len < 2**31:
        raise BadRequest(f"replay_routed_experts_start_len must be in 0..{2**31 - 1}")


def _prompts(request: GenerateReqInput) -> tuple[list[list[int]], bool]:
    """Return the token ids of each prompt, none for a text, and whether the request is a batch."""
    text, input_ids = request.text, request.input_ids
    if text is None and input_ids is None:
        raise BadRequest("Either text, input_ids or input_embeds should be provided.")
    if text is not None and input_ids is not None:
        raise BadRequest("give either text or input_ids, not both")
    if text is not None:
        if not text and not isinstance(text, str):
            raise BadRequest("text is an empty list")
        return [[] for _ in request.texts], not isinstance(text, str)
    if not input_ids:
        raise BadRequest("input_ids is empty")
    if isinstance(input_ids[0], list):
        batch: list[list[int]] = input_ids
        return list(batch), True
    single: list[int] = input_ids
    return [single], False


def _prompt_rids(rid: str | list[str] | None, count: int, is_batch: bool) -> list[str]:
    if rid is None:
        return [secrets.token_hex(16) for _ in range(count)]
    if isinstance(rid, list):
        if not is_batch or len(rid) != count:
            raise BadRequest(f"rid has {len(rid)} entries for {count} prompts")
        rids = list(rid)
    else:
        rids = [f"{rid}_{index}" for index in range(count)] if is_batch else [rid]
    if len(set(rids)) != len(rids):
        raise BadRequest("rid names the same id twice")
    for name in rids:
        if not 0 < len(name) <= MAX_RID_CHARS:
            raise BadRequest(f"a rid must have 1 to {MAX_RID_CHARS} characters")
    return rids


def _column(name: str, value: Any, count: int, is_batch: bool) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if not is_batch:
        raise BadRequest(f"{name} is a list, but there is one prompt")
    if len(value) != count:
        raise BadRequest(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _earlier_counts(request: GenerateReqInput, ids: Sequence[Sequence[int]], is_batch: bool) -> list[int]:
    """Return how many of the last ids of each prompt are output of an earlier request.  Raises `BadRequest`."""
    counts: list[int] = _column("prior_output_tokens", request.prior_output_tokens, len(ids), is_batch)
    if any(counts) and request.text is not None:
        raise BadRequest("prior_output_tokens counts token ids: send the prompt as input_ids")
    for count, prompt in zip(counts, ids):
        if count and not 0 < count < len(prompt):
            raise BadRequest(f"prior_output_tokens is {count}, but the prompt has {len(prompt)} tokens in all")
    return counts


def _continued(params: SamplingParams, count: int, budget: int | None) -> SamplingParams:
    """Return the parameters after `count` tokens.  `budget`: the number of tokens that `params` leave open, if so."""
    if not count:
        return params
    if budget is not None:
        params = msgspec.structs.replace(params, max_new_tokens=budget)
    return continued_params(params, count)


def _token_ids_column(value: Any, count: int, is_batch: bool) -> list[list[int] | None]:
    """Return the ids of each prompt: a flat list is for every prompt, a list of lists gives each prompt its own."""
    if value is not None and len(value) > max(MAX_TOKEN_IDS_LOGPROB, MAX_BATCH):
        raise BadRequest(f"token_ids_logprob holds at most {MAX_TOKEN_IDS_LOGPROB} ids, got {len(value)}")
    if value is None or not value or all(isinstance(item, int) for item in value):
        return [value] * count
    if not all(item is None or isinstance(item, list) for item in value):
        raise BadRequest("token_ids_logprob mixes token ids and lists")
    return _column("token_ids_logprob", value, count, is_batch)


def _sampling_params(raw_params: Sequence[dict[str, Any]]) -> tuple[list[SamplingParams], list[str]]:
    """Return the parameters of each prompt, and the keys that are not known; checks `n`, which is how many samples it
    has.

    Prompts that share an object share what is read from it.
    """
    unknown: dict[str, None] = {}
    read: dict[int, SamplingParams] = {}
    for raw in raw_params:
        if id(raw) not in read:
            read[id(raw)], unknown_here = sampling_params_from_dict(raw)
            unknown |= dict.fromkeys(name for name in unknown_here if _is_ignored(name, raw[name]))
    params = [read[id(raw)] for raw in raw_params]
    for parsed in params:
        if not 1 <= parsed.n <= MAX_N:
            raise BadRequest(f"sampling_params: n must be between 1 and {MAX_N}, got {parsed.n}")
    total = sum(parsed.n for parsed in params)
    if total > MAX_SAMPLES:
        raise TooLarge(f"a request makes at most {MAX_SAMPLES} samples (prompts times n), got {total}")
    return params, list(unknown)


def _is_ignored(name: str, value: Any) -> bool:
    """Return whether an unknown key asks for something; `custom_params` is handled, not ignored."""
    if value is None or name in HARMLESS_SAMPLING_FIELDS or name == "custom_params":
        return False
    return bool(value) or name not in KNOWN_SAMPLING_FIELDS


def _samples(rid: str, params: SamplingParams, count: int) -> list[tuple[str, int | None]]:
    """Return the id and seed of each sample of a prompt, whose last `count` tokens are output.

    A given seed moves on by one per sample, so that samples differ.
    """
    if params.n == 1:
        return [(rid, _seed(params.sampling_seed, 0, count))]
    return [(f"{rid}_{index}", _seed(params.sampling_seed, index, count)) for index in range(params.n)]


def _seed(seed: int | None, index: int, count: int) -> int | None:
    if seed is None:
        return None
    own = _wrap_int64(seed + index)
    return continued_seed(own, count) if count else own


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


class IgnoredFields:
    """The unknown fields of generation requests, for their answers and once for the log."""

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def of(self, request: GenerateReqInput, sampling_keys: Sequence[str]) -> list[str]:
        """Return the paths of the unknown fields of a body, and of the unknown keys of `sampling_params`.

        Raises `BadRequest` for such a key under --strict-requests; bodies were checked as they were read.
        """
        if sampling_keys and self._is_strict:
            raise BadRequest(unknown_field(f"sampling_params.{sampling_keys[0]}", KNOWN_SAMPLING_FIELDS))
        names = [shown(f"sampling_params.{key}") for key in sampling_keys[:MAX_IGNORED]]
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
                self._logged.add(name)
                logger.warning("%s is not known and has no effect", name)
        return [*request.ignored_fields, *names]
