"""Requests with grammars and lists of tokens, through whole engines, in both loops.

Texts are judged by `re` and `jsonschema`, log-probabilities by transformers' logits under the recorded masks.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from capture.replay import masked_logprobs
from capture.sampling_mask import SamplingMask
from examples.make_checkpoint.run import make_checkpoint
from rollout.core.grammar import Grammar
from rollout.grammar.restriction import Restriction
from rollout.grammar.rows import RestrictedRows
from rollout.text.tokenizer_files import read_tokenizer
from tests.late_loop import overlap
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_spec
from tests.scheduler_harness import Harness, Result

REGEX = "(ab|ba){3,9}(yes|no)!?"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 999}, "ok": {"type": "boolean"}},
    "required": ["answer", "ok"],
    "additionalProperties": False,
}
SMALL = {"max_total_tokens": 112, "chunked_prefill_size": 8, "max_running_requests": 6, "weight_version": "v0"}
PROMPTS = [[5 + n, 7, 9, 11, *range(20, 30 + n)] for n in range(8)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("grammars")
    old, new = (make_checkpoint(base / name, tiny_spec(seed=seed)) for name, seed in (("old", 1), ("new", 2)))
    return old, new


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: overlap(monkeypatch)


def asks() -> list[dict[str, Any]]:
    """Return settings with and without grammars, greedy and not, with filters, penalties and lists."""
    regex, schema = Grammar("regex", REGEX), Grammar("json_schema", json.dumps(SCHEMA))
    common = {"max_new_tokens": 24, "ignore_eos": False}
    return [
        common | {"grammar": regex, "temperature": 1.0, "sampling_seed": 1},
        common | {"grammar": schema, "temperature": 0.0},
        common | {"temperature": 1.0, "sampling_seed": 2},
        common | {"grammar": regex, "temperature": 0.8, "top_p": 0.9, "sampling_seed": 3, "min_new_tokens": 5},
        common | {"grammar": regex, "temperature": 1.0, "frequency_penalty": 1.0, "sampling_seed": 4},
        common | {"allowed_token_ids": [40, 41, 42], "bad_word_ids": [[40], [41, 42]], "sampling_seed": 5},
        common | {"grammar": regex, "temperature": 0.0, "ignore_eos": True},
        common | {"grammar": schema, "temperature": 1.3, "top_k": 7, "sampling_seed": 6, "logit_bias": {300: 1.0}},
    ]


def run_all(harness: Harness, picked: range | list[int] = range(8)) -> dict[int, Result]:
    rids = {i: harness.submit(PROMPTS[i], params=asks()[i], return_sampling_mask=True) for i in picked}
    harness.run()
    harness.check_idle()
    return {i: harness.results[rid] for i, rid in rids.items()}


def facts(result: Result) -> tuple[Any, ...]:
    assert result.finished is not None
    mask = result.mask
    return result.token_ids, result.logprobs, mask.counts, bytes(mask.token_ids), mask.logprobs, result.finished.reason


def judge(folder: Path, results: dict[int, Result]) -> list[str]:
    """Return what is wrong with the texts of finished requests."""
    backend, wrong = read_tokenizer(folder).backend, []
    for i, result in results.items():
        params, reason = asks()[i], result.finished.reason
        text = backend.decode(result.token_ids, skip_special_tokens=True)
        grammar = params.get("grammar")
        if "allowed_token_ids" in params and not set(result.token_ids) <= {41, 42}:
            wrong.append(f"{i}: {result.token_ids}")
        if "allowed_token_ids" in params and any(
            pair == (41, 42) for pair in zip(result.token_ids, result.token_ids[1:])
        ):
            wrong.append(f"{i}: a bad word in {result.token_ids}")
        if grammar is None or reason.type != "stop":
            continue
        if grammar.kind == "regex" and not re.fullmatch(REGEX, text):
            wrong.append(f"{i}: {text!r}")
        if grammar.kind == "json_schema":
            jsonschema.validate(json.loads(text), SCHEMA)
    return wrong


def test_texts_follow_their_grammars_and_both_loops_and_small_pools_give_the_same_bits(
    folders: tuple[Path, Path], late: Callable[[], None]
) -> None:
    large = run_all(Harness(folders[0], weight_version="v0"))
    assert judge(folders[0], large) == []
    ended = [i for i, result in large.items() if result.finished.reason.type == "stop"]
    assert {0, 3, 4, 6} <= set(ended), {i: result.finished.reason for i, result in large.items()}
    small = run_all(Harness(folders[0], **SMALL))
    assert sum(result.finished.num_retractions for result in small.values()) > 0
    late()
    late_small = run_all(Harness(folders[0], **SMALL))
    for i, result in large.items():
        assert facts(result) == facts(small[i]) == facts(late_small[i]), i


def test_a_request_with_a_grammar_has_the_same_bits_alone_and_among_others(folders: tuple[Path, Path]) -> None:
    harness = Harness(folders[0], weight_version="v0")
    together = run_all(harness)
    for i in (0, 1, 3, 7):
        assert facts(run_all(harness, [i])[i]) == facts(together[i])


def test_a_matcher_goes_on_over_a_refresh_in_the_middle(folders: tuple[Path, Path]) -> None:
    harness = Harness(folders[0], weight_version="v0")
    rids = [harness.submit(PROMPTS[i], params=asks()[i], return_sampling_mask=True) for i in range(8)]
    deadline = time.monotonic() + 60  # steps do not wait for a grammar to be compiled
    while not any(len(result.token_ids) > 1 for result in harness.results.values()):
        assert time.monotonic() < deadline
        harness.tick()
    assert refresh(harness, logical_tensors(folders[1]), "v1").success
    harness.run()
    results = {i: harness.results[rid] for i, rid in enumerate(rids)}
    assert judge(folders[0], results) == []
    assert any(len(result.versions) > 1 for result in results.values())


def test_replayed_masks_give_the_log_probabilities_of_the_engine(folders: tuple[Path, Path]) -> None:
    results = run_all(Harness(folders[0], weight_version="v0"))
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    for i in (0, 1, 3, 6):
        result, params = results[i], asks()[i]
        ids = torch.tensor([*PROMPTS[i], *result.token_ids])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(PROMPTS[i]) - 1 : -1]
        offsets = np.cumsum([0, *result.mask.counts], dtype=np.int64)
        mask = SamplingMask(np.frombuffer(result.mask.token_ids, dtype="<i4").astype(np.int32), offsets)
        temperature = params["temperature"] or 1.0
        if params.get("min_new_tokens") is None:
            assert all(len(mask[n]) < 60 for n in range(len(mask)))
        replayed = masked_logprobs(logits, torch.tensor(result.token_ids), mask, temperature)
        assert replayed.tolist() == pytest.approx(result.mask.logprobs, abs=1e-5)
        if "top_p" not in params:  # without filters it is the log-probability itself
            assert replayed.tolist() == pytest.approx(result.logprobs, abs=1e-5)
            plain = torch.log_softmax(logits / temperature, -1)[range(len(logits)), result.token_ids]
            assert plain.tolist() != pytest.approx(result.logprobs, abs=1e-3), "the grammar has no bias to undo"


def test_a_request_without_an_allowed_token_fails_alone_with_a_reason(folders: tuple[Path, Path]) -> None:
    harness = Harness(folders[0], weight_version="v0")
    params = {"grammar": Grammar("regex", "ab"), "max_new_tokens": 9, "min_new_tokens": 9, "ignore_eos": False}
    rids = [harness.submit(PROMPTS[0], params=params), harness.submit(PROMPTS[1], params=asks()[0])]
    rids.append(harness.submit(PROMPTS[2], params={"grammar": Grammar("regex", "a("), "max_new_tokens": 4}))
    harness.run()
    failed, other, refused = (harness.results[rid].finished.reason for rid in rids)
    assert (failed.type, failed.status_code) == ("abort", 400) and "min_new_tokens" in failed.message
    assert 1 <= len(harness.results[rids[0]].token_ids) <= 2 and other.type == "stop"
    assert refused.status_code == 400 and "unclosed group" in refused.message
    harness.check_idle()


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (Restriction, "feed", lambda self, token_ids: setattr(self, "num_fed", self.num_fed + len(list(token_ids)))),
        (RestrictedRows, "write", lambda self: self._out_GW.fill(-1)),
    ],
    ids=["tokens are not followed", "all tokens are allowed"],
)
def test_a_wrong_engine_is_noticed(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    results = run_all(Harness(folders[0], weight_version="v0"), [0, 5])
    reasons = [result.finished.reason.type for result in results.values()]
    assert judge(folders[0], results) or "stop" not in reasons
