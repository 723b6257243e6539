"""Drafts over HTTP: the same answers, SGLang's fields in `meta_info`, and metrics under both names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from tests.engine_thread import EngineThread
from tests.http_harness import live_server
from tests.model_zoo import tiny_checkpoint
from tests.troubleshooting import require_entry

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]


def answers(folder: Path, **settings: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the answers to a group and to a greedy request, one after the other, and the metrics behind them."""
    body = {"input_ids": PROMPT, "return_logprob": True}
    group = {"sampling_params": {"n": 4, "max_new_tokens": 40, "temperature": 0.2, "sampling_seed": 3}}
    greedy = {"sampling_params": {"max_new_tokens": 90, "temperature": 0}, "stream": False}
    with live_server(folder, with_tokenizer=False, engine=EngineThread, max_total_tokens=2048, **settings) as server:
        post = server.client.post
        found = [*post("/generate", json=body | group).json(), post("/generate", json=body | greedy).json()]
        return found, server.client.get("/metrics").text


def test_a_server_that_drafts_answers_the_same_and_counts(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", seed=2)
    plain, plain_metrics = answers(folder)
    drafted, metrics = answers(folder, speculative_algorithm="NGRAM")
    for got, want in zip(drafted, plain, strict=True):
        assert got["output_ids"] == want["output_ids"]
        assert got["meta_info"]["output_token_logprobs"] == want["meta_info"]["output_token_logprobs"]
        assert "spec_verify_ct" not in want["meta_info"]
    facts = [got["meta_info"] for got in drafted if "spec_verify_ct" in got["meta_info"]]
    assert facts
    for meta in facts:
        kept, tokens = meta["spec_accept_token_num"], meta["completion_tokens"]
        assert 0 <= kept <= meta["spec_draft_token_num"] and 1 <= meta["spec_verify_ct"] <= tokens
        assert meta["spec_accept_rate"] == kept / meta["spec_draft_token_num"]
        assert meta["spec_accept_length"] == tokens / (tokens - kept)
        steps = meta["spec_accept_histogram"]
        assert sum(steps) == meta["spec_verify_ct"] and sum(n * count for n, count in enumerate(steps)) == kept
    for name, value in (
        ("vllm:spec_decode_num_drafts_total", sum(meta["spec_verify_ct"] for meta in facts)),
        ("vllm:spec_decode_num_draft_tokens_total", sum(meta["spec_draft_token_num"] for meta in facts)),
        ("vllm:spec_decode_num_accepted_tokens_total", sum(meta["spec_accept_token_num"] for meta in facts)),
    ):
        assert number(metrics, name) == value
        assert number(plain_metrics, name) == 0
    by_place = re.findall(r"^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    kept = [float(number) for number in by_place]
    assert sum(kept) == sum(meta["spec_accept_token_num"] for meta in facts) and kept == sorted(kept, reverse=True)
    assert "accepted_tokens_per_pos_total{" not in plain_metrics
    assert number(metrics, "sglang:spec_accept_length") >= 1.0


def number(metrics: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}\{{.*\}} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_algorithm": "EAGLE3"},
        {"speculative_algorithm": "NEXTN", "speculative_num_steps": 9},
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 0},
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 65},
        {"speculative_algorithm": "NGRAM", "speculative_ngram_capacity": -1},
        {"speculative_algorithm": "STANDALONE"},
        {"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "d"},
        {"speculative_algorithm": "NGRAM", "speculative_num_steps": 0},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(StartupError) as refused:
        check_settings(ServerArgs(model_path="m", **settings))
    require_entry(str(refused.value))
