"""Parts that answers of several dialects share, made of native responses.

Pure functions over the dicts that `tokenizer_manager.response` builds.

A native log-probability entry is `[log-probability or None, token id, text or None]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LOWEST_LOGPROB = -3.4028234663852886e38
"""The lowest float32.  It stands for minus infinity, as clients of this format demand a number.

It is not vLLM's -9999, which vLLM's clients take for a log-probability that is missing.
"""

Native = dict[str, Any]
Entry = list[Any]


def usage(natives: Sequence[Native], n: int) -> dict[str, Any]:
    """Count the tokens of an answer.  The prompt of a group of n samples counts once."""
    metas = [native["meta_info"] for native in natives]
    prompt = sum(meta["prompt_tokens"] for meta in metas[::n])
    completion = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(meta["cached_tokens"] for meta in metas[::n])},
    }


def ignored_fields(native: Native) -> dict[str, Any]:
    """Return the unknown fields of the request, if there are any."""
    names = native["meta_info"].get("ignored_fields")
    return {} if names is None else {"ignored_fields": names}


def version_info(native: Native) -> dict[str, Any]:
    """Return the fields of `meta_info` about weight versions and the session."""
    meta = native["meta_info"]
    names = (
        "weight_version", "weight_versions", "weight_version_start", "weight_version_end", "prefill_weight_versions",
        "kv_weight_version_oldest", "kv_weight_epoch_oldest", "session_id",
    )  # fmt: skip
    return {name: meta[name] for name in names if name in meta}


def token_record(native: Native) -> dict[str, Any]:
    """Return what a trainer needs of a finished sample, as every door for chats hands it out.

    `prompt_token_ids` are the prompt as the engine read it.  `output_token_logprobs` has a number for each of
    `output_token_ids`.  Versions have the names of `meta_info`, and so have routes and sampling masks where they were
    recorded.
    """
    meta = native["meta_info"]
    recorded = ("routed_experts", "output_token_sampling_mask", "output_token_sampling_logprobs", "adapter")
    return {
        "id": meta["id"],
        "prompt_token_ids": native["prompt_token_ids"],
        "output_token_ids": native["output_ids"],
        "output_token_logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
        "finish_reason": meta["finish_reason"],
        **version_info(native),
        **{name: value for name, value in meta.items() if name.startswith(recorded)},
    }


def prompt_logprobs(meta: dict[str, Any], num_top: int) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's form: an object for each token, and null for the first one.

    An object maps token ids to log-probability and rank: the token itself, then the `num_top` most probable ones.  A
    token that is not among these has the rank `num_top + 1`: its true rank is not better.
    """
    entries = meta["input_token_logprobs"]
    tops = beside(meta, "input_top_logprobs", 0, entries, num_top)
    return [None if entry[0] is None else _ranked(entry, top) for entry, top in zip(entries, tops)]


def _ranked(own: Entry, top: Sequence[Entry]) -> dict[str, Any]:
    ranks = {entry[1]: rank for rank, entry in enumerate(top, start=1)}
    return {
        str(entry[1]): {
            "logprob": finite(entry[0]), "rank": ranks.get(entry[1], len(top) + 1), "decoded_token": entry[2],
        }
        for entry in [own, *top]
    }  # fmt: skip


def finish_fields(native: Native) -> dict[str, Any]:
    """Return `finish_reason` as one word, which may be `abort`, and the token or text that matched a stop."""
    reason = native["meta_info"]["finish_reason"]
    if reason is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": reason["type"], "matched_stop": reason.get("matched")}


def beside(
    meta: dict[str, Any], name: str, first: int, entries: Sequence[Entry], num_top: int | None
) -> list[list[Entry]]:
    """Return the `num_top` most probable tokens at the place of each entry.

    The engine records equally many for the prompt and for the output of a request, so longer lists are cut.
    """
    return [(top or [])[:num_top] for top in meta[name][first:]] if num_top else [[] for _ in entries]


def finite(value: float) -> float:
    """Return `value`, or the lowest float32 for minus infinity."""
    return max(value, LOWEST_LOGPROB)
