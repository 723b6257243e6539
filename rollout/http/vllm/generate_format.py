"""Native responses in the form of vLLM's token endpoint: token ids, their log-probabilities, routed experts.

Pure functions over the dicts that `tokenizer_manager.response` builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.http.openai.format import (
    Entry,
    Native,
    beside,
    finish_fields,
    finite,
    ignored_fields,
    prompt_logprobs,
    usage,
    version_info,
)
from rollout.http.vllm.generate_protocol import TokenGenerateRequest


def choice(request: TokenGenerateRequest, index: int, native: Native, first: int = 0) -> dict[str, Any]:
    """A choice with its output from token `first` on; routes and versions are null until it has ended."""
    meta, params = native["meta_info"], request.sampling_params
    fields = {
        "index": index,
        "token_ids": native["output_ids"][first:],
        "logprobs": None if params.logprobs is None else _logprobs(meta, first, params.logprobs),
        "routed_experts": meta.get("routed_experts"),
        "sampling_mask": meta["output_token_sampling_mask"][first:] if "output_token_sampling_mask" in meta else None,
        "weight_versions": meta.get("weight_versions"),
    }
    return fields | finish_fields(native)


def tail(request: TokenGenerateRequest, natives: Sequence[Native]) -> dict[str, Any]:
    """Return the fields that follow the choices."""
    params, meta = request.sampling_params, natives[0]["meta_info"]
    fields: dict[str, Any] = {
        "usage": usage(natives, params.n),
        "metadata": version_info(natives[0]),
        "prompt_logprobs": None,
        "kv_transfer_params": request.kv_transfer_params,
    }
    if params.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(meta, params.prompt_logprobs)
    return fields | ignored_fields(natives[0])


def prompt_fields(request: TokenGenerateRequest) -> dict[str, Any]:
    """The prompt as it was computed, where `return_token_ids` asks for it; there are no media in it."""
    return {"prompt_token_ids": request.token_ids, "mm_placeholders": {}} if request.return_token_ids else {}


def _logprobs(meta: dict[str, Any], first: int, num_top: int) -> dict[str, Any]:
    """One object per output token from `first` on.  Every value is a finite number."""
    entries = meta["output_token_logprobs"][first:]
    tops = beside(meta, "output_top_logprobs", first, entries, num_top)
    return {"content": [_token(entry) | {"top_logprobs": list(map(_token, top))} for entry, top in zip(entries, tops)]}


def _token(entry: Entry) -> dict[str, Any]:
    """Older clients read the id in `token`, newer ones `token_id`."""
    return {"token": f"token_id:{entry[1]}", "token_id": entry[1], "logprob": finite(entry[0])}
