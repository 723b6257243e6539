"""The sampling settings of one request: the typed, validated form of the wire's `sampling_params`."""

from __future__ import annotations

from numbers import Integral
from typing import Annotated, Any, Literal

import msgspec

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.grammar import GRAMMAR_FIELDS, Grammar, grammar_in

SamplingLogprobsMode = Literal["selected", "support"]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
GREEDY_TEMPERATURE = 1e-6
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
MAX_TEMPERATURE = MAX_FLOAT32  # beyond it float32 has infinity: a forbidden token would get NaN
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_N = 512


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """Sampling parameters with SGLang's names and defaults.

    `temperature < 1e-6` means greedy.  `top_k <= 0` means all tokens.  `sampling_seed` None lets the
    scheduler draw one.  `grammar`: what the text must match.  `allowed_token_ids` None: all; the model's end tokens are
    not among them unless named.  No text of `bad_words` is sampled; `bad_word_ids` has their token sequences, whose
    last token is forbidden after the others.
    """

    max_new_tokens: _Int64 = 128
    min_new_tokens: _Int64 = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: _Int64 = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[_Int64] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: _Int64 = 1
    logit_bias: dict[_Int64, float] = {}
    sampling_seed: _Int64 | None = None
    grammar: Grammar | None = None
    allowed_token_ids: list[_Int64] | None = None
    bad_words: list[str] = []
    bad_word_ids: list[list[_Int64]] = []

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def filters(self) -> bool:
        """True if tokens are chosen from fewer than all of the vocabulary."""
        return self.is_greedy or self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0 or self.is_restricted

    @property
    def is_restricted(self) -> bool:
        """True if a grammar, `allowed_token_ids` or `bad_words` forbid tokens."""
        return self.grammar is not None or self.allowed_token_ids is not None or bool(self.bad_words)

    @property
    def effective_temperature(self) -> float:
        """The divisor of the logits: greedy requests keep theirs as they are."""
        return 1.0 if self.temperature < GREEDY_TEMPERATURE else self.temperature

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    def validate(self, vocab_size: int) -> None:
        """Raise `BadRequest` naming the first field that is out of range."""
        self.validate_numbers()
        self.validate_lists(vocab_size)

    def validate_numbers(self) -> None:
        """Raise `BadRequest` for the first field of one number that is out of range."""
        _require(self.max_new_tokens >= 0, "max_new_tokens must be at least 0", self.max_new_tokens)
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens must be between 0 and max_new_tokens ({self.max_new_tokens})",
            self.min_new_tokens,
        )
        _require(
            0.0 <= self.temperature <= MAX_TEMPERATURE,
            f"temperature must be between 0 and {MAX_TEMPERATURE:g}, the largest float32",
            self.temperature,
        )
        _require(0.0 < self.top_p <= 1.0, "top_p must be in (0, 1]", self.top_p)
        _require(self.top_k >= -1, "top_k must be at least 1, or -1 or 0 for all tokens", self.top_k)
        _require(0.0 <= self.min_p <= 1.0, "min_p must be in [0, 1]", self.min_p)
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty must be in [-2, 2]", self.frequency_penalty)
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty must be in [-2, 2]", self.presence_penalty)
        _require(0.0 < self.repetition_penalty <= 2.0, "repetition_penalty must be in (0, 2]", self.repetition_penalty)
        _require(1 <= self.n <= MAX_N, f"n must be between 1 and {MAX_N}", self.n)
        if self.sampling_seed is not None:
            _require(-(2**63) <= self.sampling_seed < 2**63, "sampling_seed must fit 64 bits", self.sampling_seed)

    def validate_lists(self, vocab_size: int) -> None:
        """Raise `BadRequest` for the first field of many values that is out of range."""
        _require(len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} stop strings", len(self.stop))
        for text in self.stop:
            _require(
                0 < len(text) <= MAX_STOP_STRING_CHARS,
                f"a stop string must have 1 to {MAX_STOP_STRING_CHARS} characters",
                text[:40],
            )
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids",
            len(self.stop_token_ids),
        )
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} logit_bias entries", len(self.logit_bias)
        )
        for token_id, bias in self.logit_bias.items():
            _require(0 <= token_id < vocab_size, f"logit_bias key must be a token id in [0, {vocab_size})", token_id)
            _require(-1e4 <= bias <= 1e4, "logit_bias values must be in [-10000, 10000]", bias)
        self.validate_restrictions(vocab_size)

    def validate_restrictions(self, vocab_size: int) -> None:
        """Raise `BadRequest` for the first of `grammar`, `allowed_token_ids` and `bad_words` that is out of range."""
        if self.grammar is not None:
            self.grammar.validate()
        if self.allowed_token_ids is not None:
            count = len(self.allowed_token_ids)
            _require(
                0 < count <= MAX_ALLOWED_TOKEN_IDS,
                f"allowed_token_ids must have 1 to {MAX_ALLOWED_TOKEN_IDS} ids",
                count,
            )
            for token_id in self.allowed_token_ids:
                _require(0 <= token_id < vocab_size, f"allowed_token_ids must be in [0, {vocab_size})", token_id)
        _require(len(self.bad_words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} bad_words", len(self.bad_words))
        for word in self.bad_words:
            _require(
                len(word.strip()) > 0 and len(word) <= MAX_BAD_WORD_CHARS,
                f"a bad word must have 1 to {MAX_BAD_WORD_CHARS} characters, not all of them spaces",
                word[:40],
            )


NOT_ON_THE_WIRE = frozenset({"grammar", "bad_word_ids"})
"""Fields that are made of others."""
# Wire spellings that differ from the field they set: vLLM's.
ALIASES = {
    "seed": "sampling_seed",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
}


def sampling_params_from_dict(raw: dict[str, Any]) -> tuple[SamplingParams, list[str]]:
    """Build parameters from a wire dict.

    Returns the parameters and the names of keys that are not known (the caller logs them; clients send extras).
    Raises `BadRequest` on a wrong type.
    """
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for key, value in raw.items():
        name = ALIASES.get(key, key)
        if name in GRAMMAR_FIELDS:
            continue
        if name not in SamplingParams.__struct_fields__ or name in NOT_ON_THE_WIRE:
            unknown.append(key)
        elif value is not None:
            if isinstance(value, list | dict) and len(value) > MAX_LOGIT_BIAS:
                raise BadRequest(
                    f"sampling_params: {key} has {len(value)} entries, which is over the limit of any list"
                )
            known[name] = value
    known["grammar"] = _grammar(raw)
    if isinstance(known.get("stop"), str):
        known["stop"] = [known["stop"]]
    if known.get("top_k") == 0:
        known["top_k"] = -1
    if "logit_bias" in known:
        known["logit_bias"] = _logit_bias(known["logit_bias"])
    try:
        return msgspec.convert(known, SamplingParams), unknown
    except msgspec.ValidationError as error:
        raise BadRequest(f"sampling_params: {error}") from None


def _grammar(raw: dict[str, Any]) -> Grammar | None:
    try:
        return grammar_in(raw)
    except (BadRequest, UnsupportedFeature) as error:
        raise type(error)(f"sampling_params: {error}") from None


def _logit_bias(raw: Any) -> dict[int, float]:
    """Read `logit_bias` by token id, with the text keys of JSON too: `{"17": -2.0}`.

    Raises `BadRequest` for a key that is not a whole number.
    """
    if not isinstance(raw, dict):
        raise BadRequest("sampling_params: logit_bias must be an object of token id to number")
    result: dict[int, float] = {}
    for key, value in raw.items():
        token_id = _token_id(key)
        if token_id is None:
            raise BadRequest(f"sampling_params: logit_bias key {str(key)[:40]!r} is not a token id")
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > MAX_FLOAT32:
            raise BadRequest(f"sampling_params: logit_bias value for {token_id} must be a number that float32 can hold")
        if token_id in result:
            raise BadRequest(f"sampling_params: logit_bias has token {token_id} twice")
        result[token_id] = float(value)
    return result


def _token_id(key: Any) -> int | None:
    """Return the token id in a key: text in JSON, an integer in Python.  None if the key is no id."""
    if isinstance(key, str):
        return int(key) if len(key) < 20 and key.isascii() and key.isdigit() else None
    return int(key) if isinstance(key, Integral) and not isinstance(key, bool) else None


def _require(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise BadRequest(f"sampling_params: {rule}, got {value!r}")
