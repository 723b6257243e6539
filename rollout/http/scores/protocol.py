"""Bodies of the doors that pool, in the forms of OpenAI, vLLM and SGLang, and what they ask of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rollout.core.errors import BadRequest
from rollout.core.known_fields import UNSUPPORTED_GENERATE_FIELDS
from rollout.core.messages.pooling import PoolingParams
from rollout.http.generation import AnyGeneration, Count
from rollout.http.protocol import TokenIds
from rollout.tokenizer_manager.request import MAX_BATCH, GenerateReqInput

Input = Annotated[str | list[str] | TokenIds | list[TokenIds], Field(union_mode="left_to_right")]
Texts = str | list[str]
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
    """POST /v1/rerank.  `top_n`: the number of documents to answer with, 0 for all."""

    query: str
    documents: list[str]
    top_n: Count = 0
    return_documents: bool = True
    use_activation: bool = True

    def pairs(self) -> list[tuple[str, str]]:
        """Return the query with each document.  Raises `BadRequest`."""
        return _pairs(self.query, self.documents)


def _pairs(first: Texts, second: Texts) -> list[tuple[str, str]]:
    """Return one text with each of a list, or the elements of two lists.  Raises `BadRequest`."""
    left = [first] if isinstance(first, str) else first
    right = [second] if isinstance(second, str) else second
    if not right or len(left) not in (1, len(right)):
        raise BadRequest(f"the texts must be 1 and n, or n and n, got {len(left)} and {len(right)}")
    if len(right) > MAX_BATCH:
        raise BadRequest(f"a request holds at most {MAX_BATCH} pairs, got {len(right)}")
    return list(zip(left * (len(right) // len(left)), right))
