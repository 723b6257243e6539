"""The most that a request may come to hold, counted before memory or time is spent on it.

Everything that a client can multiply is a `Kind` here, counted at the most that it can become.  There are two limits:

    --max-request-mb         bytes of everything, in the main process and in the scheduler, each; also of the hidden
                             states of all requests together (`hidden_memory.py`)
    --max-logprob-entries    entries: what else could have been sampled, as alternatives and sampling masks

The main process keeps a finished sample as it came until its siblings have ended.  Then one sample after the other
becomes JSON; in a stream, and in an answer of another dialect, all of them are there as objects.  Bytes are measured
ones, rounded up (`tests/integration/test_request_memory.py`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rollout.core.errors import TooLarge
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.tokenizer_manager.request import GenerateReqInput, RoutesFormat
from rollout.tokenizer_manager.response import RouteShape

UNITS = 16
"""Units in an entry."""


class Kind(NamedTuple):
    """The cost of each thing of a kind: bytes in the main process and in the scheduler, and units of an entry.

    In the main process it takes `held` bytes, and `built` bytes while its answer is made.
    """

    what: str
    held: float
    built: float
    scheduler: float
    units: int = 0


CHAR_BYTES = 8
"""Bytes a character of text that an answer repeats, while it is made."""
STREAMED = 1.25
"""Factor for streams: each event copies what was built."""

KINDS: Mapping[str, Kind] = {
    "sample": Kind("samples", 4096, 0, 4096),
    "prompt": Kind("prompt tokens", 64, 0, 64),
    "stop_id": Kind("stop_token_ids", 8, 0, 96),
    "stop_char": Kind("characters of stop strings", 8, 0, 8),
    "bias": Kind("logit_bias entries", 32, 0, 128),
    "chosen_id": Kind("token_ids_logprob", 16, 0, 48),
    "replayed": Kind("ids of replayed routes", 4, 0, 8),
    "penalised": Kind("tokens that a repetition penalty looks at", 0, 0, 24),
    "answered": Kind("prompt tokens in the answer", 8, 24, 0),
    "token": Kind("tokens", 64, 48, 80),
    "logprob": Kind("log-probabilities", 48, 192, 192),
    "logprob_compact": Kind("log-probabilities", 48, 96, 192),
    "logprob_reformed": Kind("log-probabilities", 48, 720, 192),
    "alternative": Kind("top and chosen log-probabilities", 52, 216, 40, UNITS),
    "alternative_compact": Kind("top and chosen log-probabilities", 20, 64, 40, UNITS // 8),
    "alternative_reformed": Kind("top and chosen log-probabilities", 36, 640, 40, UNITS),
    "mask": Kind("sampling masks", 48, 160, 192),
    "mask_id": Kind("ids of sampling masks", 12, 64, 28, UNITS),
    "mask_id_columns": Kind("ids of sampling masks", 12, 40, 28, UNITS // 16),
    "mask_logprob": Kind("log-probabilities of sampling masks", 28, 96, 28, UNITS // 2),
    "route_byte": Kind("bytes of routed experts", 1.5, 0, 5),
    "pooled": Kind("pooled numbers", 4, 56, 16),
    "hidden_byte": Kind("bytes of hidden states", 1.5, 0, 5),
    "hidden_number": Kind("numbers of hidden states in lists", 24, 40, 0),
    "encoded_byte": Kind("bytes of encoded routes or hidden states", 2, 1.5, 0),
}
"""The kinds that are counted: a sample, a prompt and its fields; then the fields that come with each token."""


@dataclass(frozen=True)
class AnswerForm:
    """The form that a request chooses for its answer.

    `streams`: the objects of all samples are kept.  `reformed`: they become objects of another dialect.
    """

    streams: bool = False
    reformed: bool = False
    compact_logprobs: bool = False
    mask_columns: bool = False
    routes_format: RoutesFormat = "compatible"
    prompt_ids: bool = False
    hidden_lists: bool = True

    @classmethod
    def of(cls, request: GenerateReqInput) -> AnswerForm:
        return cls(
            streams=request.stream,
            reformed=request.is_reformed,
            compact_logprobs=request.logprobs_format == "compact",
            mask_columns=request.sampling_mask_format != "lists",
            routes_format=request.routed_experts_format,
            prompt_ids=request.return_prompt_token_ids,
            hidden_lists=request.hidden_form != "compact",
        )


@dataclass(frozen=True)
class BudgetLimits:
    """`mask_tokens`: most ids of a token's sampling mask."""

    max_request_bytes: int = 2048 << 20
    max_logprob_entries: int = 1 << 22
    mask_tokens: int = 4096

    def require_text(self, num_chars: int, what: str) -> None:
        """Raise `TooLarge` for an answer that repeats more text than a request may hold."""
        if num_chars * CHAR_BYTES > self.max_request_bytes:
            raise TooLarge(
                f"the answer would hold {num_chars} characters of {what}, {CHAR_BYTES} bytes each; the limit is "
                f"{self.max_request_bytes >> 20} MB. Ask for fewer samples. The server's flag is --max-request-mb."
            )


class HiddenSize(NamedTuple):
    """The size of a model's hidden state: its numbers, and the bytes of each."""

    numbers: int
    number_bytes: int


class RequestBudget:
    """The account of one request: `add` its prompts, then `require` that it fits."""

    def __init__(
        self,
        limits: BudgetLimits,
        form: AnswerForm,
        routes: RouteShape,
        vocab_size: int,
        hidden: HiddenSize,
    ) -> None:
        self._limits = limits
        self._form = form
        self._routes = routes
        self._hidden = hidden
        self._max_ids = min(limits.mask_tokens, vocab_size)
        self._total: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._largest_built = 0.0  # bytes of the largest sample while it is built
        self._open: list[TokenizedGenerateReqInput] = []  # prompts whose masks are as large as sampling makes them
        self._hidden_total: dict[str, int] = {}  # what `total` has for hidden states

    def add(self, source: TokenizedGenerateReqInput) -> None:
        """Count a prompt and its samples."""
        params, total, built = source.sampling_params, self._total, 0.0
        for name, count in self._sample(source).items():
            total[name] += params.n * count
            built += KINDS[name].built * count
        self._largest_built = max(self._largest_built, built)
        for name, count in self._hidden_states(source).items():
            self._hidden_total[name] = self._hidden_total.get(name, 0) + params.n * count
        total["prompt"] += len(source.input_ids)
        total["stop_char"] += sum(map(len, params.stop))
        total["bias"] += len(params.logit_bias)
        total["chosen_id"] += len(source.token_ids_logprob or ())
        if source.replay is not None:
            total["replayed"] += math.prod(source.replay.shape)

    def require(self) -> None:
        """Raise `TooLarge` for a request over a limit, naming limit, value and flag.

        Masks that only sampling bounds are counted with one id a token.  If all that they could hold does not fit,
        each of their samples gets an equal share of the rest, `max_mask_ids` of its message.
        """
        excess = self._excess(0)
        if excess is not None:
            raise TooLarge(excess)
        if not self._open:
            return
        most = max(prompt.sampling_params.max_new_tokens * (self._max_ids - 1) for prompt in self._open)
        if self._excess(most) is None:
            return
        share = bisect.bisect_left(range(most), True, key=lambda ids: self._excess(ids + 1) is not None)
        for prompt in self._open:
            prompt.max_mask_ids = prompt.sampling_params.max_new_tokens + share

    @property
    def hidden_bytes(self) -> int:
        """The bytes that hidden states may take, in the process where they take more."""
        counts = [(KINDS[name], count) for name, count in self._hidden_total.items()]
        held = sum(kind.held * count for kind, count in counts)
        return math.ceil(max(held, sum(kind.scheduler * count for kind, count in counts)))

    # --- what is counted -----------------------------------------------------------------------------------------

    def _sample(self, source: TokenizedGenerateReqInput) -> dict[str, int]:
        """Return the counts of one sample, by kind."""
        params, prompt_len, form = source.sampling_params, len(source.input_ids), self._form
        new = params.max_new_tokens
        counts = {"sample": 1, "stop_id": len(params.stop_token_ids), "token": new}
        if params.repetition_penalty != 1.0:
            counts["penalised"] = prompt_len + new
        if form.prompt_ids:
            counts["answered"] = prompt_len
        if source.return_logprob:
            scored = prompt_len - source.logprob_start_len if source.logprob_start_len >= 0 else 0
            suffix = "_compact" if form.compact_logprobs else "_reformed" if form.reformed else ""
            counts[f"logprob{suffix}"] = new + scored
            width = source.top_logprobs_num + len(source.token_ids_logprob or ())
            counts[f"alternative{suffix}"] = (new + scored) * width
        if source.return_sampling_mask:
            counts |= self._masks(source)
        if source.pooling is not None:
            counts["pooled"] = (prompt_len if source.pooling.kind == "all" else 1) * self._hidden.numbers
        if source.return_routed_experts:
            rows = max(prompt_len + new - 1 - source.routed_experts_start_len, 0)
            counts["route_byte"] = rows * self._routes.token_bytes
            counts["encoded_byte"] = rows * self._routes.encoded_bytes(form.routes_format)
        for name, count in self._hidden_states(source).items():
            counts[name] = counts.get(name, 0) + count
        return counts

    def _hidden_states(self, source: TokenizedGenerateReqInput) -> dict[str, int]:
        """Return the counts of a sample's hidden states."""
        params = source.hidden_states
        if params is None:
            return {}
        num_tokens = len(source.input_ids) + source.sampling_params.max_new_tokens
        numbers = (num_tokens - params.start) * len(params.layers) * self._hidden.numbers
        num_bytes = numbers * self._hidden.number_bytes
        if self._form.hidden_lists:
            return {"hidden_byte": num_bytes, "hidden_number": numbers}
        return {"hidden_byte": num_bytes, "encoded_byte": -(-num_bytes * 4 // 3)}

    def _masks(self, source: TokenizedGenerateReqInput) -> dict[str, int]:
        """Return the counts of a sample's masks, as large as the request states."""
        params = source.sampling_params
        most = min(params.top_k, self._max_ids)
        if params.is_greedy:
            most = -1 if params.is_restricted else 1
        if most <= 0:  # top-p or min-p alone, or the tokens that a grammar allows a greedy row
            most = 1
            self._open.append(source)
        return {"mask": params.max_new_tokens} | self._mask_ids(source, params.max_new_tokens * most)

    def _mask_ids(self, source: TokenizedGenerateReqInput, count: int) -> dict[str, int]:
        ids = {"mask_id_columns" if self._form.mask_columns else "mask_id": count}
        return ids | ({"mask_logprob": count} if source.sampling_logprobs_mode == "support" else {})

    # --- the limits ----------------------------------------------------------------------------------------------

    def _excess(self, more_mask_ids: int) -> str | None:
        """Return why the request is too large with `more_mask_ids` in each open mask's sample; None if it is not."""
        total, largest = self._total, self._largest_built
        if more_mask_ids:
            total = total.copy()
            samples = sum(prompt.sampling_params.n for prompt in self._open)
            for name, count in self._mask_ids(self._open[0], more_mask_ids).items():
                total[name] += samples * count
                largest += KINDS[name].built * count
        held = built = scheduler = units = 0.0
        for name, count in total.items():
            if count:
                kind = KINDS[name]
                held += kind.held * count
                built += kind.built * count
                scheduler += kind.scheduler * count
                units += kind.units * count
        if units > UNITS * self._limits.max_logprob_entries:
            return self._too_many_entries(total)
        at_once = self._form.streams or self._form.reformed
        main = held + (built * (STREAMED if self._form.streams else 1) if at_once else largest)
        if max(main, scheduler) > self._limits.max_request_bytes:
            return self._too_many_bytes(total, main, scheduler)
        return None

    def _too_many_entries(self, total: Mapping[str, int]) -> str:
        used = {KINDS[name]: count for name, count in total.items() if count and KINDS[name].units}
        each, limit = max(kind.units for kind in used), UNITS * self._limits.max_logprob_entries
        units = sum(kind.units * count for kind, count in used.items())
        return (
            f"up to {units // each} {' and '.join(dict.fromkeys(kind.what for kind in used))} (n x tokens x entries of "
            f"each, over all prompts) are over the limit of {limit // each}. Ask for fewer samples, tokens, "
            "alternatives or ids, or for a compact form; or split the request. The server's flag is "
            "--max-logprob-entries."
        )

    def _too_many_bytes(self, total: Mapping[str, int], main: float, scheduler: float) -> str:
        def share(name: str) -> float:
            kind = KINDS[name]
            return total[name] * (kind.held + kind.built if main >= scheduler else kind.scheduler)

        largest = max(total, key=share)
        return (
            f"the request may come to {math.ceil(max(main, scheduler) / 2**20)} MB, mostly for {total[largest]} "
            f"{KINDS[largest].what} of all samples. The limit is {self._limits.max_request_bytes >> 20} MB. Ask for "
            "fewer samples or tokens, for less with each, or for a compact form; or split the request. The server's "
            "flag is --max-request-mb."
        )
