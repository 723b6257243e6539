"""Bodies of the doors that pool, in the forms of OpenAI, vLLM and SGLang, and what they ask of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.known_fields import UNSUPPORTED_GENERATE_FIELDS, shown
from rollout.core.messages.pooling import PoolingParams
from rollout.http.generation import AnyGeneration, Count
from rollout.http.protocol import FreeForm, TokenIds
from rollout.tokenizer_manager.request import MAX_BATCH, GenerateReqInput

Input = Annotated[str | list[str] | TokenIds | list[TokenIds], Field(union_mode="left_to_right")]
Texts = str | list[str]
Content = Annotated[str | dict[str, Any] | list[dict[str, Any]], Field(union_mode="left_to_right"), FreeForm]
Encoding = Literal["float", "base64"]
OneRow = Literal["last", "mean", "cls"]


class ScoreBody(AnyGeneration):
    """The fields of every door that pools.  Chats are refused: send the ids of a rendered one."""

    unsupported: ClassVar[frozenset[str]] = UNSUPPORTED_GENERATE_FIELDS | {"stream", "priority", "messages"}

    model: str | None = None
    rid: str | None = None

    def to_request(self, prompts: Any, headers: Mapping[str, str], pooling: PoolingParams | None) -> GenerateReqInput:
        """Return the request for `prompts`: a text, the ids of one, or a list of either.

        Raises `BadRequest`.
        """
        if isinstance(prompts, list) and not prompts:
            raise BadRequest("the input is an empty list")
        is_text = isinstance(prompts, str) or isinstance(prompts[0], str)
        return GenerateReqInput(
            **{"text" if is_text else "input_ids": prompts},
            **self.common_fields(headers),
            rid=self.rid,
            model=self.model,
            sampling_params={"max_new_tokens": 0},
            return_routed_experts=False,
            return_sampling_mask=False,
            is_reformed=True,
            pooling=pooling,
        )


class EmbeddingRequest(ScoreBody):
    """POST /v1/embeddings.  Rows are cut to their first `dimensions` numbers, then scaled to length 1."""

    input: Input
    encoding_format: Encoding = "float"
    dimensions: int | None = None
    pooling: OneRow = "last"
    normalize: bool = True


class PoolingRequest(ScoreBody):
    """POST /pooling.  `task`: by default the labels of a classifier, and embeddings of other models."""

    input: Input
    encoding_format: Encoding = "float"
    dimensions: int | None = None
    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    pooling: OneRow = "last"
    normalize: bool | None = None
    use_activation: bool | None = None


class PromptRequest(ScoreBody):
    """POST /encode, SGLang's form: the prompts of /generate."""

    text: Texts | None = None
    input_ids: Annotated[TokenIds | list[TokenIds] | None, Field(union_mode="left_to_right")] = None
    dimensions: int | None = None

    @property
    def prompts(self) -> Any:
        """The prompts.  Raises `BadRequest` unless they come in exactly one form."""
        if (self.text is None) == (self.input_ids is None):
            raise BadRequest("give either text or input_ids")
        return self.input_ids if self.text is None else self.text


class ClassifyRequest(ScoreBody):
    """POST /classify: `input` in vLLM's form, or `text` or `input_ids` in SGLang's, whose answer is the raw numbers."""

    input: Input | None = None
    text: Texts | None = None
    input_ids: Annotated[TokenIds | list[TokenIds] | None, Field(union_mode="left_to_right")] = None
    use_activation: bool = True

    @property
    def prompts(self) -> Any:
        """The prompts.  Raises `BadRequest` unless they come in exactly one form."""
        given = [prompts for prompts in (self.input, self.text, self.input_ids) if prompts is not None]
        if len(given) != 1:
            raise BadRequest("give exactly one of input, text and input_ids")
        return given[0]


class ScoreRequest(ScoreBody):
    """POST /v1/score: pairs of texts in vLLM's form, or label tokens after a prompt in SGLang's.

    vLLM's pairs are `text_1` and `text_2`, `queries` and `documents`, or `data_1` and `data_2`.  SGLang's prompts are
    `query` and each of `items`, in the other order with `item_first`.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    use_activation: bool = True
    query: Annotated[str | TokenIds | None, Field(union_mode="left_to_right")] = None
    items: Input | None = None
    label_token_ids: TokenIds | None = None
    apply_softmax: bool = False
    item_first: bool = False

    def pairs(self) -> list[tuple[str, str]] | None:
        """Return the pairs of texts; None for a request in SGLang's form.  Raises `BadRequest`."""
        forms = [(self.text_1, self.text_2), (self.queries, self.documents), (self.data_1, self.data_2)]
        given = [form for form in forms if form != (None, None)]
        if self.query is not None or self.items is not None or self.label_token_ids is not None:
            given.append((None, None))
        if len(given) != 1:
            raise BadRequest("give either text_1 and text_2, or query, items and label_token_ids")
        (first, second) = given[0]
        if first is None and second is None:
            return None
        if first is None or second is None:
            raise BadRequest("a score needs both texts of each pair")
        return _pairs(first, second)

    def label_prompts(self) -> list[Any]:
        """Return each prompt after which label tokens are scored.  Raises `BadRequest`."""
        query = self.query
        items: Any = self.items
        if query is None or not items or not self.label_token_ids:
            raise BadRequest("query, items and label_token_ids must be given, and not be empty")
        if isinstance(items, str) or isinstance(items[0], int):
            items = [items]
        if isinstance(query, str) != isinstance(items[0], str):
            raise BadRequest("query and items must both be text, or both be token ids")
        return [item + query if self.item_first else query + item for item in items]


class RerankRequest(ScoreBody):
    """POST /v1/rerank.  `top_n`: the number of documents to answer with, 0 for all.

    Texts may come as objects: Jina's and Cohere's `{"text"}`, or SGLang's and vLLM's lists of content parts.
    `answer_format`: `results` in an object, as Jina, Cohere and vLLM have them, or SGLang's bare `list`.  Bodies
    of both are the same, so the client names the form.  The numbers of a list are the model's own, as in SGLang.
    """

    query: Content
    documents: list[Content]
    top_n: Count = 0
    return_documents: bool = True
    use_activation: bool | None = None
    answer_format: Literal["results", "list"] = "results"

    @property
    def activates(self) -> bool:
        """True if scores go through the activation of the model's labels."""
        return self.answer_format == "results" if self.use_activation is None else self.use_activation

    def texts(self) -> list[str]:
        """Return the documents as texts.  Raises `BadRequest`, and `UnsupportedFeature` for media."""
        return [_text_of(each, f"documents[{index}]") for index, each in enumerate(self.documents)]

    def pairs(self, texts: list[str]) -> list[tuple[str, str]]:
        """Return the query with each document.  Raises as `texts` does."""
        return _pairs(_text_of(self.query, "query"), texts)


def _text_of(content: str | dict[str, Any] | list[dict[str, Any]], place: str) -> str:
    """Return the text of a query or a document, parts of it with spaces between them, as SGLang joins them.

    Raises `BadRequest`, and `UnsupportedFeature` for media.
    """
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind, text = part.get("type", "text"), part.get("text")
        if kind != "text":
            raise UnsupportedFeature(f"{place} has a part of the type {shown(str(kind))}; this server reads text only")
        if not isinstance(text, str):
            raise BadRequest(f"{place} has a part without text")
        texts.append(text)
    return " ".join(texts)


def _pairs(first: Texts, second: Texts) -> list[tuple[str, str]]:
    """Return one text with each of a list, or the elements of two lists.  Raises `BadRequest`."""
    left = [first] if isinstance(first, str) else first
    right = [second] if isinstance(second, str) else second
    if not right or len(left) not in (1, len(right)):
        raise BadRequest(f"the texts must be 1 and n, or n and n, got {len(left)} and {len(right)}")
    if len(right) > MAX_BATCH:
        raise BadRequest(f"a request holds at most {MAX_BATCH} pairs, got {len(right)}")
    return list(zip(left * (len(right) // len(left)), right))
