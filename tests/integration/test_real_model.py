"""A trained model end to end: SmolLM2-135M-Instruct over HTTP, held to transformers on the same checkpoint.

`make real-model` makes the checkpoint once, `make test-real-model` runs these tests, and `make test-full` does both.
Shapes: S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rollout.numerics import engine_logprobs, use_engine_numerics
from tests.server_process import ServerProcess

CHECKPOINT = Path(__file__).resolve().parents[2] / "build" / "real-model" / "checkpoint"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (CHECKPOINT / "config.json").is_file(), reason="make real-model makes the checkpoint"),
]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees",
    "1, 1, 2, 3, 5, 8,",
    "Grüße aus München! Das Wetter ist heute",
    "To make a good cup of tea, first",
    "The three laws of motion were written by",
]
QUESTIONS = ["What is the capital of France?", "Name three colours.", "Write one sentence about the sea."]
NEW_TOKENS = 24
TOLERANCE = 1e-3  # of a log-probability: float32 sums of 30 layers in another order
TIED = 1e-3  # in the probability of a token that stands at the edge of a filter


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    settings = {"dtype": "float32", "max_total_tokens": 8192, "context_length": 2048, "weight_version": "trained"}
    with ServerProcess(CHECKPOINT, sampling_mask_max_tokens=49152, **settings) as one:
        yield one


def posted(server: ServerProcess, path: str, **body: Any) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the logits of transformers' model, [S, V] in float32."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


@torch.no_grad()
def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Generate `count` tokens with transformers' own loop."""
    output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=count, pad_token_id=2)
    return output[0, len(ids) :].tolist()


def test_greedy_text_is_transformers(server: ServerProcess, model: Any, tokenizer: Any) -> None:
    """The prompts come all at once, in one batch of the server."""
    body = {"prompt": PROMPTS, "max_tokens": NEW_TOKENS, "temperature": 0}
    answers = [choice["text"] for choice in posted(server, "/v1/completions", **body)["choices"]]
    wanted = [greedy(model, tokenizer(prompt).input_ids, NEW_TOKENS) for prompt in PROMPTS]
    assert answers == [tokenizer.decode(ids, skip_special_tokens=True) for ids in wanted]
    assert answers[0].startswith(" Paris")


def test_echo_scores_the_prompt_as_transformers_does(server: ServerProcess, model: Any, tokenizer: Any) -> None:
    body = {"prompt": PROMPTS, "max_tokens": 0, "echo": True, "logprobs": 3}
    for prompt, choice in zip(PROMPTS, posted(server, "/v1/completions", **body)["choices"], strict=True):
        ids = tokenizer(prompt).input_ids
        logprobs_SV = logits_of(model, ids).log_softmax(-1)
        right = logprobs_SV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        stated = choice["logprobs"]
        assert choice["text"] == prompt and stated["token_logprobs"][0] is None
        assert (torch.tensor(stated["token_logprobs"][1:]) - right).abs().max() < TOLERANCE
        best = logprobs_SV[:-1].topk(3).values
        found = torch.tensor([sorted(top.values(), reverse=True)[:3] for top in stated["top_logprobs"][1:]])
        assert (found - best).abs().max() < TOLERANCE
        assert "".join(stated["tokens"]) == prompt or "\ufffd" in "".join(stated["tokens"])


FILTERS: dict[str, tuple[dict[str, float], list[Any]]] = {
    "top_k": ({"top_k": 20}, [TopKLogitsWarper(20)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
}


@pytest.mark.parametrize("name", list(FILTERS))
def test_filters_leave_what_transformers_leaves(server: ServerProcess, model: Any, tokenizer: Any, name: str) -> None:
    """Each token's mask is the ids that transformers' processor leaves, but for those at its very edge."""
    params, warpers = FILTERS[name]
    temperature, in_doubt = 0.9, 0
    for seed, prompt in enumerate(PROMPTS[:4]):
        sampling = {"temperature": temperature, "max_new_tokens": NEW_TOKENS, "sampling_seed": seed, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling | params, "return_logprob": True}
        answer = posted(server, "/generate", **body, return_sampling_mask=True)
        output, meta = answer["output_ids"], answer["meta_info"]
        ids = tokenizer(prompt).input_ids
        scores_SV = logits_of(model, [*ids, *output])[len(ids) - 1 : -1] / temperature
        kept_SV = scores_SV
        for warper in warpers:
            kept_SV = warper(None, kept_SV)
        for step, mask in enumerate(meta["output_token_sampling_mask"]):
            wanted = set(kept_SV[step].isfinite().nonzero().flatten().tolist())
            probabilities = scores_SV[step].softmax(-1)
            edge = min(float(probabilities[token]) for token in wanted)
            odd = wanted ^ set(mask)
            assert all(abs(float(probabilities[token]) - edge) < TIED for token in odd), (prompt, step)
            in_doubt += bool(odd)
            assert output[step] in mask
            stated = meta["output_token_sampling_logprobs"][step]
            support = scores_SV[step][sorted(mask)].log_softmax(-1)
            assert abs(stated - float(support[sorted(mask).index(output[step])])) < TOLERANCE
    assert in_doubt <= 2


def test_the_template_is_the_tokenizer_s(server: ServerProcess, model: Any, tokenizer: Any) -> None:
    """The server's ids of the prompt, and the model's answer to them, are the tokenizer's and transformers'."""
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "return_token_ids": True}
        answer = posted(server, "/v1/chat/completions", **body)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert answer["prompt_token_ids"] == ids
        wanted = greedy(model, ids, NEW_TOKENS)
        assert answer["choices"][0]["message"]["content"] == tokenizer.decode(wanted, skip_special_tokens=True)
    first = posted(server, "/v1/chat/completions", messages=[{"role": "user", "content": QUESTIONS[0]}], temperature=0)
    assert "Paris" in first["choices"][0]["message"]["content"]
    assert first["choices"][0]["finish_reason"] == "stop"


def test_a_trainer_under_engine_numerics_has_the_same_bits(tokenizer: Any) -> None:
    """The bits are compared in bfloat16, of 96 sampled tokens and the prompts that they follow."""
    trainer = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16).eval()
    with ServerProcess(CHECKPOINT, dtype="bfloat16", max_total_tokens=8192, context_length=2048) as server:
        assert server.http.get("/server_info").json()["batch_invariant"]
        digest = server.http.get("/model_info").json()["config_digest"]
        sampling = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "sampling_seed": 3}
        body = {"text": PROMPTS[:4], "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        answers = posted(server, "/generate", **body)
    compared = 0
    with use_engine_numerics(trainer, config_digest=digest), torch.no_grad():
        for prompt, answer in zip(PROMPTS, answers, strict=False):
            ids, meta = tokenizer(prompt).input_ids, answer["meta_info"]
            whole = torch.tensor([[*ids, *answer["output_ids"]]])
            ours = engine_logprobs(trainer(input_ids=whole).logits[:, :-1], whole[:, 1:])[0]
            stated = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
            assert ours.tolist() == [entry[0] for entry in stated]
            compared += len(answer["output_ids"])
    assert compared == 4 * NEW_TOKENS
