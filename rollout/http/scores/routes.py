"""/v1/embeddings, /encode, /pooling, /classify, /v1/score and /v1/rerank.

Bodies are in `protocol`; the forms are OpenAI's, vLLM's and SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from rollout.core.errors import Unavailable, UnsupportedFeature
from rollout.core.messages.pooling import PoolingParams
from rollout.core.specs.heads import LabelsSpec
from rollout.http.answers import usage
from rollout.http.io import NamingRoute, body_schema, json_body, json_response, until_disconnect
from rollout.http.scores.pooled import Pooled, encoded, head, pool, probabilities, shown, softmax
from rollout.http.scores.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    PromptRequest,
    RerankRequest,
    ScoreBody,
    ScoreRequest,
)
from rollout.tokenizer_manager.manager import TokenizerManager

EmbeddingBody = Annotated[EmbeddingRequest, Depends(json_body(EmbeddingRequest))]
EncodeBody = Annotated[PromptRequest, Depends(json_body(PromptRequest))]
PoolingBody = Annotated[PoolingRequest, Depends(json_body(PoolingRequest))]
ClassifyBody = Annotated[ClassifyRequest, Depends(json_body(ClassifyRequest))]
ScoresBody = Annotated[ScoreRequest, Depends(json_body(ScoreRequest))]
RerankBody = Annotated[RerankRequest, Depends(json_body(RerankRequest))]

_EMBEDDING = PoolingParams(normalise=True)
_SCORES = PoolingParams(scores=True)


class ScoreRoutes:
    """Embeddings, classes and scores of prompts, without a token generated; scores of label tokens with one."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def router(self) -> APIRouter:
        router = APIRouter(route_class=NamingRoute, tags=["scores"])
        doors: list[tuple[tuple[str, ...], Callable[..., Any], type[ScoreBody]]] = [
            (("/v1/embeddings",), self.embeddings, EmbeddingRequest),
            (("/encode",), self.encode, PromptRequest),
            (("/pooling",), self.pooling, PoolingRequest),
            (("/classify", "/v1/classify"), self.classify, ClassifyRequest),
            (("/score", "/v1/score"), self.score, ScoreRequest),
            (("/rerank", "/v1/rerank", "/v2/rerank"), self.rerank, RerankRequest),
        ]
        for paths, answer, body in doors:
            for path in paths:
                router.add_api_route(path, answer, methods=["POST"], openapi_extra=body_schema(body))
        return router

    # --- embeddings ----------------------------------------------------------------------------------------------

    async def embeddings(self, request: Request, body: EmbeddingBody) -> Response:
        """Return the embeddings of one input or several, in OpenAI's form."""
        params = PoolingParams(kind=body.pooling, normalise=body.normalize, dimensions=body.dimensions)
        pooled, _ = await self._pool(request, body, body.input, params)
        return await self._list("embd", body, pooled, "embedding", "embedding", body.encoding_format)

    async def encode(self, request: Request, body: EncodeBody) -> Response:
        """Return the embeddings of one prompt or several, in SGLang's form."""
        params = PoolingParams(normalise=True, dimensions=body.dimensions)
        return await self._native(request, body, body.prompts, params)

    async def pooling(self, request: Request, body: PoolingBody) -> Response:
        """Return pooled rows in vLLM's form: a row of each prompt, or for `token_` tasks a row of each token."""
        labels = self._manager.model_config.head
        task = body.task
        if task is None:
            of_labels = isinstance(labels, LabelsSpec)
            task = "embed" if not of_labels else "token_classify" if self._labels().of_tokens else "classify"
        if task == "classify":
            self._require_sequences()
        of_tokens, scores = task.startswith("token_"), task.endswith("classify")
        params = PoolingParams(
            kind="all" if of_tokens else "last" if scores else body.pooling,
            scores=scores,
            normalise=not scores and body.normalize is not False,
            dimensions=None if scores else body.dimensions,
        )
        pooled, _ = await self._pool(request, body, body.input, params)
        if scores and body.use_activation is not False:
            pooled = [Pooled(probabilities(each.rows_NC, self._labels()), each.native) for each in pooled]
        return await self._list("pool", body, pooled, "pooling", "data", body.encoding_format, of_tokens=of_tokens)

    # --- labels --------------------------------------------------------------------------------------------------

    async def classify(self, request: Request, body: ClassifyBody) -> Response:
        """Return labels with probabilities in vLLM's form, or the raw numbers in SGLang's."""
        self._require_sequences()
        if body.input is None:
            return await self._native(request, body, body.prompts, _SCORES)
        pooled, _ = await self._pool(request, body, body.prompts, _SCORES)
        labels = self._labels()

        def entry(index: int) -> dict[str, Any]:
            numbers_L = pooled[index].rows_NC[0]
            values_L = probabilities(numbers_L, labels) if body.use_activation else numbers_L
            label = labels.labels[int(np.argmax(numbers_L))]
            return {"index": index, "label": label, "probs": values_L.tolist(), "num_classes": len(numbers_L)}

        return await self._answer("classify", body, pooled, entry)

    async def score(self, request: Request, body: ScoresBody) -> Response:
        """Score pairs of texts, or label tokens after prompts."""
        pairs = body.pairs()
        if pairs is None:
            return await self._score_labels(request, body)
        values, pooled = await self._score_pairs(request, body, pairs, body.use_activation)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)]
        return json_response(head("score", self._name(body), pooled) | {"data": data})

    async def rerank(self, request: Request, body: RerankBody) -> Response:
        """Sort documents by their score with a query, best first, in vLLM's form or in SGLang's."""
        texts = body.texts()
        values, pooled = await self._score_pairs(request, body, body.pairs(texts), body.activates)
        best = sorted(range(len(values)), key=lambda index: -values[index])[: body.top_n or None]

        def result(index: int) -> dict[str, Any]:
            document = {"document": {"text": texts[index]}} if body.return_documents else {}
            return {"index": index, **document, "relevance_score": values[index]}

        def listed(index: int) -> dict[str, Any]:
            document = {"document": texts[index]} if body.return_documents else {}
            meta = pooled[index].native["meta_info"] if self._classifies else None  # else of texts, not of pairs
            return {"score": values[index], **document, "index": index, "meta_info": meta}

        is_list, size = body.answer_format == "list", sum(map(len, texts))
        before = None if is_list else head("rerank", self._name(body), pooled)
        entries = [partial(listed if is_list else result, index) for index in best]
        return Response(await encoded(before, "results", entries, size), media_type="application/json")

    # --- parts ---------------------------------------------------------------------------------------------------

    async def _pool(
        self, request: Request, body: ScoreBody, prompts: Any, params: PoolingParams
    ) -> tuple[list[Pooled], bool]:
        wanted = body.to_request(prompts, request.headers, params)
        return await until_disconnect(request.scope, request.receive, pool(self._manager, wanted))

    async def _native(self, request: Request, body: ScoreBody, prompts: Any, params: PoolingParams) -> Response:
        """Answer in SGLang's form: an object with the row of the prompt, or a list of them."""
        pooled, is_list = await self._pool(request, body, prompts, params)

        def entry(index: int) -> dict[str, Any]:
            each = pooled[index]
            return {"embedding": each.rows_NC[0].tolist(), "meta_info": each.native["meta_info"]}

        if not is_list:
            return json_response(entry(0))
        entries = [partial(entry, index) for index in range(len(pooled))]
        content = await encoded(None, "", entries, sum(each.rows_NC.size for each in pooled))
        return Response(content, media_type="application/json")

    async def _list(
        self,
        prefix: str,
        body: ScoreBody,
        pooled: Sequence[Pooled],
        object_name: str,
        field: str,
        encoding: str,
        *,
        of_tokens: bool = False,
    ) -> Response:
        """Answer with the rows of each prompt; with the one row of each unless they are `of_tokens`."""

        def entry(index: int) -> dict[str, Any]:
            rows_NC = pooled[index].rows_NC
            values = shown(rows_NC if of_tokens else rows_NC[0], encoding)
            return {"index": index, "object": object_name, field: values}

        return await self._answer(prefix, body, pooled, entry)

    async def _answer(self, prefix: str, body: ScoreBody, pooled: Sequence[Pooled], entry: Any) -> Response:
        entries = [partial(entry, index) for index in range(len(pooled))]
        size = sum(each.rows_NC.size for each in pooled)
        content = await encoded(head(prefix, self._name(body), pooled), "data", entries, size)
        return Response(content, media_type="application/json")

    async def _score_pairs(
        self, request: Request, body: ScoreBody, pairs: list[tuple[str, str]], use_activation: bool
    ) -> tuple[list[float], list[Pooled]]:
        """Return the score of each pair: of a classifier with one label, or the cosine of two embeddings.

        Raises `UnsupportedFeature` for a classifier of several labels, or of tokens.
        """
        if self._classifies:
            self._require_sequences()
            if len(self._labels().labels) != 1:
                raise UnsupportedFeature(
                    f"a pair has one score, but this model has {len(self._labels().labels)} labels: ask /classify"
                )
            ids = await self._manager.tokenizer.encode_pairs(pairs)
            pooled, _ = await self._pool(request, body, ids, _SCORES)
            numbers_NL = np.concatenate([each.rows_NC for each in pooled])
            values_NL = probabilities(numbers_NL, self._labels()) if use_activation else numbers_NL
            return values_NL[:, 0].tolist(), pooled
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        pooled, _ = await self._pool(request, body, texts, _EMBEDDING)
        rows = {text: each.rows_NC[0].astype(np.float64) for text, each in zip(texts, pooled)}
        return [float(rows[first] @ rows[second]) for first, second in pairs], pooled

    async def _score_labels(self, request: Request, body: ScoreRequest) -> Response:
        """Answer with the probability of each label token after each prompt, over the vocabulary or among the labels.

        The next token's log-probabilities come with a token that is sampled and dropped.
        """
        wanted = body.to_request(body.label_prompts(), request.headers, None)
        wanted.sampling_params = {"max_new_tokens": 1, "temperature": 1.0}
        wanted.return_logprob, wanted.token_ids_logprob = True, body.label_token_ids

        async def results() -> list[dict[str, Any]]:
            return await (await self._manager.submit(wanted)).results()

        natives = await until_disconnect(request.scope, request.receive, results())
        rows = [row for native in natives for row in native["meta_info"]["output_token_ids_logprobs"]]
        if len(rows) != len(natives):
            raise Unavailable("the request was aborted: not every prompt has its label tokens")
        logprobs_NL = np.array([[entry[0] for entry in row] for row in rows], dtype=np.float64)
        scores = (softmax(logprobs_NL) if body.apply_softmax else np.exp(logprobs_NL)).tolist()
        data = [{"index": index, "object": "score", "score": each[0]} for index, each in enumerate(scores)]
        meta = natives[-1]["meta_info"]
        return json_response(
            {
                "object": "scoring",
                "model": self._name(body),
                "scores": scores,
                "data": data,
                "usage": usage(natives, 1),
                "metadata": {"weight_version": meta["weight_version"]},
            }
        )

    @property
    def _classifies(self) -> bool:
        return isinstance(self._manager.model_config.head, LabelsSpec)

    def _require_sequences(self) -> None:
        labels = self._manager.model_config.head
        if isinstance(labels, LabelsSpec) and labels.of_tokens:
            raise UnsupportedFeature("this model classifies tokens, not sequences: ask /pooling")

    def _labels(self) -> LabelsSpec:
        labels = self._manager.model_config.head
        assert isinstance(labels, LabelsSpec), "requests for labels are refused without them"
        return labels

    def _name(self, body: ScoreBody) -> str:
        return body.model or self._manager.server_args.name
