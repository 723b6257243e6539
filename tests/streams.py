"""Streams of /generate over real sockets: read, cut, resumed, and put together again."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

from capture.codec import decode_compact
from tests.http_harness import Live

PER_TOKEN = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)
NOT_OF_TOKENS = {"e2e_latency", "output_start", "output_token_logprobs_length", "output_token_sampling_mask_length"}

Event = dict[str, Any]


def events(live: Live, path: str = "/generate", **body: Any) -> Iterator[Event]:
    """Yield the events of a stream; closing the iterator closes the connection."""
    with live.client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix("data: "))


def cut(live: Live, num_tokens: int, **body: Any) -> list[Event]:
    """Begin a stream, and close its connection at the event by which every sample has `num_tokens`; return it all."""
    params = body.get("sampling_params", {})
    seen: dict[int, int] = dict.fromkeys(range(params.get("n", 1)), 0)
    got: list[Event] = []
    stream = events(live, stream=True, **body)
    for event in stream:
        got.append(event)
        seen[event.get("index", 0)] = event["meta_info"]["completion_tokens"]
        if min(seen.values()) >= num_tokens:
            break
    stream.close()
    return got


def resumed(live: Live, rid: str, from_token: int | Sequence[int]) -> list[Event]:
    return list(events(live, "/generate/resume", rid=rid, from_token=from_token))


def joined(parts: Sequence[Event]) -> Event:
    """Return the record that the events of one sample's incremental stream add up to.  Each must be whole in itself."""
    first = parts[0]["meta_info"]["output_start"]
    whole: Event = {"text": "", "output_ids": [], "meta_info": dict(parts[-1]["meta_info"])}
    meta = whole["meta_info"]
    lists: dict[str, list[Any]] = {name: [] for name in PER_TOKEN if name in meta}
    rows: list[Any] = []
    spans: list[dict[str, Any]] = []
    for part in parts:
        own = part["meta_info"]
        count, start = len(part["output_ids"]), own["output_start"]
        assert start == first + len(whole["output_ids"]) and own["completion_tokens"] == start + count
        assert own["weight_versions"] == [] or own["weight_versions"][0]["start"] == start, "spans begin elsewhere"
        assert not count or own["weight_versions"][-1]["end"] == start + count, "spans end elsewhere"
        spans += own["weight_versions"]
        for name, entries in lists.items():
            assert len(own[name]) == count, name
            entries += own[name]
        if "routed_experts" in own:
            rows += rows_of(own, begin=own["prompt_tokens"] + start - 1 if start else None)
        whole["text"] += part["text"]
        whole["output_ids"] += part["output_ids"]
    if "routed_experts" in meta:
        meta["routed_experts"] = rows
        meta["routed_experts_start_len"] = parts[0]["meta_info"]["routed_experts_start_len"]
    return whole | {"meta_info": meta | lists | {"weight_versions": merged(spans)}}


def rows_of(meta: Event, begin: int | None = None) -> list[Any]:
    """Return the rows of routes in an event, as lists; they must belong to its tokens, from position `begin` on."""
    routed = decode_compact(base64.b64decode(meta["routed_experts"]))
    start = routed.start
    assert start == meta["routed_experts_start_len"]
    assert start + len(routed) == meta["prompt_tokens"] + meta["completion_tokens"] - 1
    assert begin is None or start == begin, (start, begin)
    assert len(routed.missing_rows()) == 0
    rows: list[Any] = routed.logical_ids_TLK.tolist()
    return rows


def merged(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join spans that follow one another with the same weights."""
    result: list[dict[str, Any]] = []
    for span in spans:
        if result and {**result[-1], "end": span["end"]} == {**span, "start": result[-1]["start"]}:
            result[-1] = {**result[-1], "end": span["end"]}
        else:
            result.append(span)
    return result


def plain(event: Event) -> Event:
    """Return a whole answer as `joined` returns it, with routes as lists and without what times differ in."""
    meta = {name: value for name, value in event["meta_info"].items() if name not in NOT_OF_TOKENS}
    if isinstance(meta.get("routed_experts"), str):
        meta["routed_experts"] = rows_of(event["meta_info"])
    meta["weight_versions"] = merged(meta["weight_versions"])
    return {name: value for name, value in event.items() if name != "index"} | {"meta_info": meta}


def of_sample(got: Sequence[Event], index: int) -> list[Event]:
    return [event for event in got if event.get("index", 0) == index]
