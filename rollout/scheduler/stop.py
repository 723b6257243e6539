"""The end of a request: by an end token, a stop string, its grammar, its length, or a sampling mask over the limit.

Stop strings are searched for in the text with special tokens, as in SGLang, whether or not the reply's text has them.
"""

from __future__ import annotations

from functools import partial

from tokenizers import Tokenizer, decoders

from rollout.core.errors import UnsupportedFeature
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.messages.req_output import FinishReason
from rollout.core.sampling_params import SamplingParams
from rollout.grammar.compiler import GrammarCompiler
from rollout.grammar.restriction import Restriction
from rollout.grammar.vocabulary import GrammarVocabulary
from rollout.scheduler.req import Req
from rollout.text.detokenizer import INCOMPLETE, IncrementalDetokenizer


class StopChecker:
    """Decides after every sampled token.  Without a `tokenizer`, stop strings and grammars are refused."""

    def __init__(
        self, eos_token_ids: tuple[int, ...], tokenizer: Tokenizer | None, sampling_mask_max_tokens: int = 1 << 31
    ) -> None:
        self._mask_limit = sampling_mask_max_tokens
        self._eos = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        # Byte-level text is the bytes of its tokens one after the other: a token always adds the same bytes.
        self._adds_bytes = self._tokenizer is not None and isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._text_of_token: dict[int, str] = {}
        self._compiler: GrammarCompiler | None = None  # made for the first grammar

    def end_ids(self, source: TokenizedGenerateReqInput) -> frozenset[int]:
        """Return the token ids that finish a request."""
        params = source.sampling_params
        ends = frozenset() if params.ignore_eos else self._eos
        return ends.union(params.stop_token_ids) if params.stop_token_ids else ends

    def text_for(self, source: TokenizedGenerateReqInput) -> IncrementalDetokenizer | None:
        """Return a detokenizer for the request's output; None if it has no stop strings.

        Raises `UnsupportedFeature` for stop strings on a server without tokenizer.
        """
        if not source.sampling_params.stop:
            return None
        if self._tokenizer is None:
            raise UnsupportedFeature("stop strings need a tokenizer, and this server runs without one")
        return IncrementalDetokenizer(partial(self._tokenizer.decode, skip_special_tokens=False))

    def restriction_for(self, source: TokenizedGenerateReqInput, vocab_size: int) -> Restriction | None:
        """Return the tokens that the request may sample, from its beginning; None if it may sample all.

        All ranks make the same.  Raises `BadRequest` for a grammar that does not compile, `UnsupportedFeature` for any
        without its library or a tokenizer.
        """
        params = source.sampling_params
        if not params.is_restricted:
            return None
        matcher = None if params.grammar is None else self._compiler_for(vocab_size).matcher(params.grammar)
        ends = self.end_ids(source)
        return Restriction(vocab_size, params, eos_ids=self._eos, end_ids=ends, matcher=matcher)

    def _compiler_for(self, vocab_size: int) -> GrammarCompiler:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise UnsupportedFeature("grammars need a tokenizer, and this server runs without one")
        if self._compiler is None:
            self._compiler = GrammarCompiler(lambda: GrammarVocabulary.of(tokenizer, vocab_size, sorted(self._eos)))
        return self._compiler

    def mask_refusal(self, req: Req, count: int) -> FinishReason | None:
        """Return the reason to end if the next token's mask has too many ids, as no part of a mask is returned."""
        most, total = req.source.max_mask_ids, req.output.num_mask_ids + count
        if count > self._mask_limit:
            message = (
                f"a token was sampled from {count} ids, and --sampling-mask-max-tokens is {self._mask_limit}: "
                "lower top_k or top_p, raise min_p, or start the server with a higher limit"
            )
            return FinishReason(type="abort", message=message, status_code=400)
        if most is not None and total > most:
            message = (
                f"the sampling masks of {len(req.output_ids) + 1} tokens have {total} ids; each sample of the "
                f"request may have {most}. Ask for fewer samples or tokens, or for columns; lower top_p, or give a "
                "top_k. The server's flags are --max-logprob-entries and --max-request-mb."
            )
            return FinishReason(type="abort", message=message, status_code=413)
        return None

    def check(self, req: Req) -> FinishReason | None:
        """Return the reason if the last token finished `req`.

        An end token has precedence over a stop string, this over a grammar that is complete, and all over the length.
        """
        output, params = req.output_ids, req.sampling_params
        last = output[-1]
        if last in req.end_ids:
            return FinishReason(type="stop", matched=last)
        text = req.stop_text
        if text is not None and len(output) >= params.min_new_tokens and self._may_end_stop(last, params):
            matched = _matched_string(text, output, params.stop)
            if matched is not None:
                return FinishReason(type="stop", matched=matched)
        restriction = req.restriction
        if restriction is not None and restriction.ends_alone and len(output) >= params.min_new_tokens:
            restriction.follow(output)
            if restriction.is_complete:
                return FinishReason(type="stop")
        if len(output) >= params.max_new_tokens:
            return FinishReason(type="length", length=len(output))
        return None

    def _may_end_stop(self, token_id: int, params: SamplingParams) -> bool:
        """Return False if no stop string can end in this token.

        Such a token holds whole characters, and the last character of no stop string.  This spares most tokens of a
        request with stop strings the search.
        """
        if not self._adds_bytes:
            return True
        text = self._token_text(token_id)
        return INCOMPLETE in text or any(stop[-1] in text or stop[-1] == INCOMPLETE for stop in params.stop)

    def _token_text(self, token_id: int) -> str:
        assert self._tokenizer is not None
        text = self._text_of_token.get(token_id)
        if text is None:
            text = self._text_of_token[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def _matched_string(text: IncrementalDetokenizer, output: list[int], stop: list[str]) -> str | None:
    """Return the stop string that appears first in the text of `output` and ends in its last token.

    A stop string that ended earlier was ignored because of `min_new_tokens`, and stays ignored.
    """
    text.feed(output[text.num_fed : -1])
    old = len(text.decided)
    text.feed(output[-1:])
    whole = text.complete
    matches = [(whole.find(string, max(0, old - len(string) + 1)), string) for string in stop]
    return min((match for match in matches if match[0] >= 0), default=(0, None))[1]
