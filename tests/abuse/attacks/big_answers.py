"""Small requests with large answers, and as many samples as may be asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.abuse.good import tensors_of
from tests.abuse.registry import OPEN, RANKS, attack
from tests.abuse.server import Victim

MAX_IDS = 2_000_000


@attack(OPEN, seconds=120.0, keeps_mb=400, peak_mb=1500)
def answers_that_are_large(victim: Victim) -> str:
    """Ask for top log-probabilities, for masks of the whole vocabulary, for whole tensors and for long texts."""
    params = {"max_new_tokens": 400, "temperature": 1.0, "ignore_eos": True, "n": 4}
    rich: dict[str, Any] = {
        "input_ids": [3] * 200, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0,
        "top_logprobs_num": 300, "return_text_in_logprobs": True,
    }  # fmt: skip
    arrays = {**rich, "return_text_in_logprobs": False, "logprobs_format": "compact"}
    scores = {
        **arrays, "input_ids": [[3] * 400] * 64, "top_logprobs_num": 256, "token_ids_logprob": list(range(200)),
        "sampling_params": {"max_new_tokens": 0},
    }  # fmt: skip
    masks = {
        "input_ids": [3], "return_sampling_mask": True,
        "sampling_params": params | {"min_p": 1e-30, "temperature": 9.0},
    }  # fmt: skip
    name = max(tensors_of(victim.model), key=lambda name: tensors_of(victim.model)[name].numel())
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/generate", rich),
        ("/generate", rich | {"stream": True}),
        ("/generate", rich | {"token_ids_logprob": list(range(300))}),
        ("/generate", arrays),
        ("/generate", arrays | {"stream": True}),
        ("/generate", scores),
        ("/generate", scores | {"logprobs_format": "nested"}),
        ("/generate", masks),
        ("/generate", masks | {"stream": True}),
        ("/generate", masks | {"sampling_mask_format": "csr", "sampling_logprobs_mode": "support"}),
        ("/detokenize", {"tokens": [5] * MAX_IDS}),
        ("/detokenize", {"tokens": [[5] * 1000] * (MAX_IDS // 1000)}),
        ("/tokenize", {"prompt": ["a b c"] * 100_000}),
        ("/get_weights_by_name", {"name": name, "truncate_size": 2**31 - 1}),
    ]
    for path, body in calls:
        victim.call("POST", path, body, timeout=60.0)
    with ThreadPoolExecutor(4) as pool:
        for call in [pool.submit(victim.call, "POST", "/generate", rich, timeout=60.0) for _ in range(4)]:
            call.result()
    return f"{len(calls) + 4} answers"


@attack(OPEN, RANKS, seconds=150.0, keeps_mb=300, peak_mb=1200)
def as_many_samples_as_may_be(victim: Victim) -> str:
    """Ask for eight thousand samples in one call, call control verbs meanwhile, and abort the request by many names."""
    prompts = [[number + 3] * 200 for number in range(16)]
    params = {"max_new_tokens": 2, "ignore_eos": True, "n": 512}
    body = {"input_ids": prompts, "sampling_params": params, "rid": "many"}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(victim.call, "POST", "/generate", body, timeout=120.0)
        for _ in range(20):
            victim.call("GET", "/get_load")
            victim.post("/abort_request", rid="nobody")
        victim.post("/abort_request", rid=["many", *(f"many_{number}_3" for number in range(16)), "many_3", "many"])
        response = call.result()
    if response is not None and (response.status_code != 200 or len(response.json()) != 16 * 512):
        victim.complain(f"8192 samples: {response.status_code}")
    return "8192 samples, aborted"
