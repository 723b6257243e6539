"""lm-eval's model of a completions endpoint, whose tokenizer is the server's."""

from __future__ import annotations

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.utils import RemoteTokenizer

from tests.integrations.framework import Framework
from tests.server_process import ServerProcess

FRAMEWORK = Framework(name="lm-eval", packages=("lm-eval",), not_there=("its tasks: their data is not on PyPI",))
PAIRS = [("What is 2 + 3?", " 5"), ("What is 2", " + 3? It is five"), ("ü", "ber é")]


@pytest.fixture(scope="module")
def model(server: ServerProcess) -> LocalCompletionsAPI:
    """`auto` finds out that the server can tokenize."""
    name = server.client.model_info()["served_model_name"]
    return LocalCompletionsAPI(base_url=f"{server.url}/v1/completions", model=name, max_length=512, batch_size=2)


def requests(kind: str, arguments: list[tuple[object, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


def test_the_tokenizer_is_the_servers(model: LocalCompletionsAPI, server: ServerProcess) -> None:
    assert model.tokenizer_backend == "remote" and isinstance(model.tokenizer, RemoteTokenizer)
    text = "What is 2 + 3? ü"
    ids = model.tokenizer.encode(text)
    assert ids and model.tokenizer.decode(ids) == text and model.tokenizer.eos_token_id is not None
    rendered = model.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    shown = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": text}]}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": shown}).json()["prompt"] == rendered


def test_log_likelihoods_are_those_of_generate(model: LocalCompletionsAPI, server: ServerProcess) -> None:
    for (context, ending), (value, is_greedy) in zip(PAIRS, model.loglikelihood(requests("loglikelihood", [*PAIRS]))):
        ids, start = model.tokenizer.encode(context + ending), len(model.tokenizer.encode(context))
        body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        meta = server.http.post("/generate", json=body | {"sampling_params": {"max_new_tokens": 0}}).json()["meta_info"]
        entries, tops = meta["input_token_logprobs"][start:], meta["input_top_logprobs"][start:]
        assert value == pytest.approx(sum(entry[0] for entry in entries), abs=1e-4)
        assert is_greedy == all(entry[0] == top[0][0] for entry, top in zip(entries, tops))


def test_the_rolling_log_likelihood_is_negative(model: LocalCompletionsAPI) -> None:
    found = model.loglikelihood_rolling(requests("loglikelihood_rolling", [("What is 2 + 3? It is five",)]))
    assert found[0] < 0


def test_generate_until_returns_what_completions_return(model: LocalCompletionsAPI, server: ServerProcess) -> None:
    (text,) = model.generate_until(requests("generate_until", [("What is 2", {"until": ["\n\n"], "max_gen_toks": 6})]))
    body = {"prompt": "What is 2", "max_tokens": 6, "temperature": 0, "stop": ["\n\n"]}
    assert text == server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
