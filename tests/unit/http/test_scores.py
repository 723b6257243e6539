"""Embeddings, classes and scores over HTTP, in front of a real engine, against transformers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from rollout.client import RolloutClient, ServerError
from rollout.http.protocol import MAX_VALUES
from tests.engine_thread import EngineThread
from tests.family_zoo import family_model
from tests.head_zoo import PAD, headed_checkpoint, hidden_states, scores
from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_tiny_tokenizer

PROMPTS = [[5, 9, 2, 6], [7], [30, 31, 32, 33, 34, 35, 36]]
CLOSE = {"rel": 1e-4, "abs": 2e-5}  # float32 on both sides, with sums in other orders
ONE = {0: "good"}


class Served:
    """A server, and transformers' model of the same weights."""

    def __init__(self, live: Live, model: Any) -> None:
        self.live, self.model = live, model

    def post(self, path: str, **body: Any) -> Any:
        answer = self.live.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ids(self, *texts: str) -> list[int]:
        """Return the ids of texts one after the other."""
        return [token for text in texts for token in self.post("/tokenize", prompt=text)["tokens"]]


def _served(folder: Path, ending: str, **changes: Any) -> Iterator[Served]:
    if ending == "ForCausalLM":
        model = family_model("qwen3", 3, **changes)
        model.save_pretrained(folder)
    else:
        model = headed_checkpoint(folder, "qwen3", ending, **changes)
    write_tiny_tokenizer(folder)
    with live_server(folder, engine=EngineThread, max_total_tokens=4096, dtype="float32") as live:
        yield Served(live, model)
        assert live.scheduler.error is None


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from _served(tmp_path_factory.mktemp("classifier"), "ForSequenceClassification")


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from _served(tmp_path_factory.mktemp("reward"), "ForSequenceClassification", id2label=ONE)


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from _served(tmp_path_factory.mktemp("tagger"), "ForTokenClassification")


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from _served(tmp_path_factory.mktemp("causal"), "ForCausalLM")


def embedding(served: Served, prompt: list[int], kind: str = "last", dimensions: int | None = None) -> np.ndarray:
    rows = hidden_states(served.model.model, prompt).double().numpy()
    row = {"last": rows[-1], "cls": rows[0], "mean": rows.mean(0)}[kind][:dimensions]
    return row / np.linalg.norm(row)


# --- embeddings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_embeddings_are_those_of_transformers(causal: Served, kind: str) -> None:
    answer = causal.post("/v1/embeddings", input=PROMPTS, pooling=kind, model="tiny")
    assert [each["index"] for each in answer["data"]] == [0, 1, 2] and answer["model"] == "tiny"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, PROMPTS))
    assert answer["metadata"] == {"weight_version": "default"}
    for each, prompt in zip(answer["data"], PROMPTS):
        assert each["embedding"] == pytest.approx(embedding(causal, prompt, kind).tolist(), **CLOSE)


def test_openais_own_client_reads_embeddings(causal: Served) -> None:
    """It asks for base64 where its caller names no encoding."""
    with openai.OpenAI(base_url=f"{causal.live.url}/v1", api_key="none", max_retries=0) as client:
        for given, prompt in (("hello", causal.ids("hello")), (PROMPTS[0], PROMPTS[0])):
            answer = client.embeddings.create(model="tiny", input=given, dimensions=20)
            expected = embedding(causal, prompt, dimensions=20).tolist()
            assert answer.data[0].embedding == pytest.approx(expected, **CLOSE)
        both = client.embeddings.create(model="tiny", input=["hello", "END"], encoding_format="float")
        assert len(both.data) == 2 and len(both.data[1].embedding) == 64


def test_the_encodings_hold_the_same_numbers(causal: Served) -> None:
    numbers = causal.post("/v1/embeddings", input="hello")["data"][0]["embedding"]
    text = causal.post("/v1/embeddings", input="hello", encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == numbers
    native = causal.post("/encode", text="hello")
    assert native["embedding"] == numbers and native["meta_info"]["prompt_tokens"] == len(causal.ids("hello"))
    assert [each["embedding"] for each in causal.post("/encode", text=["hello"])] == [numbers]
    assert causal.post("/pooling", input="hello")["data"][0]["data"] == numbers
    rows = causal.post("/pooling", input="hello", task="token_embed")["data"][0]["data"]
    assert len(rows) == len(causal.ids("hello")) and rows[-1] == numbers


def test_a_prompt_has_the_same_bits_alone_and_among_others(causal: Served) -> None:
    alone = [causal.post("/v1/embeddings", input=[prompt])["data"][0]["embedding"] for prompt in PROMPTS]
    among = causal.post("/v1/embeddings", input=PROMPTS * 20)["data"]
    assert [each["embedding"] for each in among] == alone * 20


# --- labels ------------------------------------------------------------------------------------------------------


def test_classes_are_those_of_transformers(classifier: Served) -> None:
    answer = classifier.post("/classify", input=PROMPTS)
    native = classifier.post("/classify", input_ids=PROMPTS)
    for index, prompt in enumerate(PROMPTS):
        numbers = scores(classifier.model, prompt)
        entry = answer["data"][index]
        assert entry["probs"] == pytest.approx(numbers.softmax(-1).tolist(), **CLOSE)
        assert (entry["index"], entry["num_classes"]) == (index, 3)
        assert entry["label"] == classifier.model.config.id2label[int(numbers.argmax())]
        assert native[index]["embedding"] == pytest.approx(numbers.tolist(), **CLOSE)
        assert native[index]["meta_info"]["weight_version"] == "default"
    raw = classifier.post("/v1/classify", input=PROMPTS[0], use_activation=False)["data"][0]["probs"]
    assert raw == native[0]["embedding"]
    assert classifier.post("/pooling", input=PROMPTS[0])["data"][0]["data"] == answer["data"][0]["probs"]


@pytest.mark.parametrize("prompt", [[5, 9, PAD, PAD], [PAD, 5], [PAD, PAD], [5, PAD, 9, PAD]])
def test_padding_is_cut_as_transformers_does(classifier: Served, prompt: list[int]) -> None:
    with torch.no_grad():
        expected = classifier.model(torch.tensor([prompt])).logits[0]
    assert classifier.post("/classify", input_ids=prompt)["embedding"] == pytest.approx(expected.tolist(), **CLOSE)


def test_a_tagger_labels_each_token(tagger: Served) -> None:
    rows = tagger.post("/pooling", input=PROMPTS[2])["data"][0]["data"]
    expected = scores(tagger.model, PROMPTS[2]).softmax(-1)
    np.testing.assert_allclose(rows, expected.numpy(), rtol=1e-4, atol=2e-5)


def test_a_classifier_of_one_label_scores_and_ranks_pairs(reward: Served) -> None:
    texts = ["hello", "END", "hell"]
    expected = [float(scores(reward.model, reward.ids("he", text))[0].sigmoid()) for text in texts]
    for fields in ({"text_1": "he", "text_2": texts}, {"queries": ["he"] * 3, "documents": texts}):
        found = reward.post("/v1/score", **fields)["data"]
        assert [each["score"] for each in found] == pytest.approx(expected, **CLOSE)
    ranked = reward.post("/v1/rerank", query="he", documents=texts, top_n=2)["results"]
    order = sorted(range(3), key=lambda index: -expected[index])[:2]
    assert [each["index"] for each in ranked] == order
    assert [each["document"]["text"] for each in ranked] == [texts[index] for index in order]
    assert ranked[0]["relevance_score"] == pytest.approx(max(expected), **CLOSE)


def sglangs_clients_code(base_url: str, documents: list[Any], **fields: Any) -> list[tuple[float, str]]:
    """Return what SGLang's page on rerank models prints: the score and the document of each item of the answer."""
    data = {"model": "BAAI/bge-reranker-v2-m3", "query": "he", "documents": documents} | fields
    response_json = httpx.post(f"{base_url}/v1/rerank", json=data).json()
    return [(item["score"], item["document"]) for item in response_json]


def test_rerank_answers_in_sglangs_form_where_the_client_asks_for_it(reward: Served) -> None:
    texts = ["hello", "END", "lo"]
    found = sglangs_clients_code(reward.live.url, texts, answer_format="list")
    raw = reward.post("/v1/score", text_1="he", text_2=texts, use_activation=False)["data"]
    expected = sorted(((each["score"], texts[each["index"]]) for each in raw), reverse=True)
    assert found == expected, "the numbers of the model's head, best first"
    with pytest.raises(TypeError):
        sglangs_clients_code(reward.live.url, texts)
    (best,) = reward.post("/v1/rerank", query="he", documents=texts, top_n=1, answer_format="list")
    assert best.keys() == {"score", "document", "index", "meta_info"} and texts[best["index"]] == expected[0][1]
    assert best["meta_info"]["weight_version"] == "default" and best["meta_info"]["prompt_tokens"] > 0
    bare = reward.post("/v1/rerank", query="he", documents=texts, return_documents=False, answer_format="list")
    assert [each.keys() for each in bare] == [{"score", "index", "meta_info"}] * 3
    sigmoid = reward.post("/v1/rerank", query="he", documents=texts, use_activation=True, answer_format="list")
    results = reward.post("/v1/rerank", query="he", documents=texts, top_n=None)["results"]
    assert [each["score"] for each in sigmoid] == [each["relevance_score"] for each in results]


@pytest.mark.parametrize("form", ["list", "results"])
@pytest.mark.parametrize("name", ["reward", "causal"])
def test_rerank_reads_texts_in_every_form(name: str, form: str, request: pytest.FixtureRequest) -> None:
    served: Served = request.getfixturevalue(name)
    texts = ["hello END", "END", "lo"]
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "END"}]
    answers = []
    for query, documents in (("he", texts), ([{"type": "text", "text": "he"}], [parts, {"text": "END"}, "lo"])):
        answer = served.post("/v1/rerank", query=query, documents=documents, answer_format=form)
        entries = answer if form == "list" else answer["results"]
        answers.append([{key: value for key, value in each.items() if key != "meta_info"} for each in entries])
        assert form == "results" or [each["meta_info"] is None for each in entries] == [name == "causal"] * 3
    assert answers[0] == answers[1] and len(answers[0]) == 3


def test_other_models_score_pairs_by_the_cosine(causal: Served) -> None:
    texts = ["hello", "END"]
    query = embedding(causal, causal.ids("he"))
    expected = [float(query @ embedding(causal, causal.ids(text))) for text in texts]
    found = causal.post("/score", text_1="he", text_2=texts)["data"]
    assert [each["score"] for each in found] == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize("item_first", [False, True])
def test_label_tokens_are_scored_after_a_prompt(causal: Served, item_first: bool) -> None:
    query, items, labels = [5, 9], [[2, 6], [7]], [11, 40, 11]
    prompts = [item + query if item_first else query + item for item in items]
    with torch.no_grad():
        logits = torch.stack([causal.model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    fields = {"query": query, "items": items, "label_token_ids": labels, "item_first": item_first}
    found = causal.post("/v1/score", **fields)
    np.testing.assert_allclose(found["scores"], logits.softmax(-1)[:, labels], rtol=1e-4, atol=1e-6)
    among = causal.post("/v1/score", **fields, apply_softmax=True)
    np.testing.assert_allclose(among["scores"], logits[:, labels].softmax(-1), rtol=1e-4, atol=1e-6)
    assert [each["score"] for each in found["data"]] == [row[0] for row in found["scores"]]


# --- refusals ----------------------------------------------------------------------------------------------------


def test_a_model_is_asked_only_for_what_its_head_can_do(classifier: Served, tagger: Served, causal: Served) -> None:
    for path, body in (
        ("/generate", {"input_ids": [5]}),
        ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}),
        ("/v1/completions", {"prompt": [5]}),
        ("/v1/score", {"query": [5], "items": [[6]], "label_token_ids": [7]}),
    ):
        status, message = classifier.live.refused(path, **body)
        assert status == 400 and "no output head" in message
    for path in ("/classify", "/v1/classify"):
        status, message = causal.live.refused(path, input=[5])
        assert status == 400 and "no labels" in message
    assert "no labels" in causal.live.refused("/pooling", input=[5], task="classify")[1]
    assert "ask /classify" in classifier.live.refused("/v1/score", text_1="a", text_2="b")[1]
    assert "ask /pooling" in tagger.live.refused("/classify", input=[5])[1]
    assert classifier.live.client.get("/model_info").json()["is_generation"] is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": []}),
        ("/v1/embeddings", {"input": [[]]}),
        ("/v1/embeddings", {"input": [400]}),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}),
        ("/v1/embeddings", {"input": "a", "pooling": "all"}),
        ("/v1/embeddings", {"input": "a", "stream": True}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}),
        ("/encode", {"text": "a", "input_ids": [5]}),
        ("/classify", {}),
        ("/v1/score", {"text_1": "a"}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b", "query": "c", "items": ["d"], "label_token_ids": [5]}),
        ("/v1/score", {"query": "a", "items": [[5]], "label_token_ids": [5]}),
        ("/v1/score", {"query": "a", "items": ["b"]}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [999]}),
        ("/v1/rerank", {"query": "a", "documents": []}),
        ("/v1/rerank", {"query": "a", "documents": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        ("/v1/rerank", {"query": "a", "documents": [[{"type": "text"}]]}),
        ("/v1/rerank", {"query": {"text": 5}, "documents": ["a"]}),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "answer_format": "object"}),
    ],
)
def test_bodies_that_ask_for_nothing_sensible_are_refused(causal: Served, path: str, body: dict[str, Any]) -> None:
    answer = causal.live.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("place", ["query", "documents"])
def test_the_parts_of_a_text_are_bounded(causal: Served, place: str) -> None:
    """A refusal writes the type of a part: that of millions of values takes seconds."""
    wide: Any = {"type": [0] * (MAX_VALUES + 1)}
    body = {"query": "a", "documents": ["b"]} | {place: wide if place == "query" else ["b", wide]}
    answer = causal.live.client.post("/v1/rerank", json=body)
    assert answer.status_code == 413 and place in answer.json()["error"]["message"]


def test_an_aborted_request_is_answered(causal: Served) -> None:
    live = causal.live
    live.client.post("/pause_generation", json={"mode": "in_place"})
    with ThreadPoolExecutor(1) as pool:
        body = {"input": [5], "rid": "gone"}
        waiting = pool.submit(httpx.post, f"{live.url}/v1/embeddings", json=body, timeout=30)
        live.wait_until(lambda: live.manager.num_in_flight == 1)
        live.client.post("/abort_request", json={"rid": "gone"})
        answer = waiting.result(30)
    live.client.post("/continue_generation", json={})
    assert answer.status_code == 503 and "aborted" in answer.json()["error"]["message"]


# --- the client --------------------------------------------------------------------------------------------------


def test_our_client_returns_arrays(classifier: Served, causal: Served) -> None:
    with RolloutClient(causal.live.url) as client:
        rows = client.embed(PROMPTS, dimensions=16)
        assert (rows.shape, rows.dtype) == ((3, 16), np.float32)
        expected = [each["embedding"] for each in causal.post("/v1/embeddings", input=PROMPTS, dimensions=16)["data"]]
        assert rows.tolist() == expected
        with pytest.raises(ServerError, match="no labels"):
            client.classify("hello")
    with RolloutClient(classifier.live.url) as client:
        classes = client.classify([np.array(prompt) for prompt in PROMPTS], raw=True)
    numbers = torch.stack([scores(classifier.model, prompt) for prompt in PROMPTS])
    np.testing.assert_allclose(classes.numbers, numbers, rtol=1e-4, atol=2e-5)
    assert classes.labels == [classifier.model.config.id2label[int(row.argmax())] for row in numbers]
    assert classes.weight_version == "default"
