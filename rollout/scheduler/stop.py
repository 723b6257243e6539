"""When is a request finished?  End tokens, stop strings, length.

Knows token ids and, for stop strings, a tokenizer.  Does not know text that was already sent to anyone.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders

from rollout.core.errors import StartupError, UnsupportedFeature
from rollout.core.io_struct import FinishReason, TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.scheduler.req import Req

_INCOMPLETE = "\ufffd"  # what half a character decodes to


class StopChecker:
    """Decides after every sampled token.  `tokenizer_file` is a `tokenizer.json`, or None to refuse stop strings."""

    def __init__(self, eos_token_ids: tuple[int, ...], tokenizer_file: Path | None) -> None:
        self._eos = frozenset(eos_token_ids)
        self._tokenizer = _load_tokenizer(tokenizer_file) if tokenizer_file is not None else None
        # Byte-level text is the bytes of its tokens one after the other: what a token adds can be told from it alone.
        self._adds_bytes = self._tokenizer is not None and isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._text_of_token: dict[tuple[int, bool], str] = {}

    def end_ids(self, source: TokenizedGenerateReqInput) -> frozenset[int]:
        """Token ids that finish a request."""
        params = source.sampling_params
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)

    def window(self, source: TokenizedGenerateReqInput) -> int:
        """Most tokens that any of the request's stop strings can span: every token decodes to at least one byte.

        Raises `UnsupportedFeature` for stop strings on a server without tokenizer.
        """
        stops = source.sampling_params.stop
        if not stops:
            return 0
        if self._tokenizer is None:
            raise UnsupportedFeature("stop strings need a tokenizer.json; this server runs without tokenizer")
        return max(len(text.encode()) for text in stops) + 4

    def check(self, req: Req) -> FinishReason | None:
        """The reason if the last token finished `req`; an end token wins over a stop string over the length."""
        output, params = req.output.token_ids, req.sampling_params
        last = output[-1]
        if last in req.end_ids:
            return FinishReason(type="stop", matched=last)
        if req.stop_window and len(output) >= params.min_new_tokens and self._may_end_stop(last, params):
            matched = self._matched_string(req)
            if matched is not None:
                return FinishReason(type="stop", matched=matched)
        if len(output) >= params.max_new_tokens:
            return FinishReason(type="length", length=len(output))
        return None

    def _may_end_stop(self, token_id: int, params: SamplingParams) -> bool:
        """False if no stop string can end in this token: it holds whole characters, and the last of none of them.

        Spares most tokens of a request with stop strings the decoding of its window.
        """
        if not self._adds_bytes:
            return True
        text = self._token_text(token_id, params.skip_special_tokens)
        return _INCOMPLETE in text or any(stop[-1] in text or stop[-1] == _INCOMPLETE for stop in params.stop)

    def _token_text(self, token_id: int, skip_special_tokens: bool) -> str:
        assert self._tokenizer is not None
        key = (token_id, skip_special_tokens)
        text = self._text_of_token.get(key)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=skip_special_tokens)
            self._text_of_token[key] = text
        return text

    def _matched_string(self, req: Req) -> str | None:
        """The stop string that appears first in the text of the last tokens and ends in the newest one.

        One that ended earlier can only have been passed over because of `min_new_tokens`, and stays so.
        """
        assert self._tokenizer is not None
        skip = req.sampling_params.skip_special_tokens
        window = req.output.token_ids[-req.stop_window :]
        tail = self._tokenizer.decode(window, skip_special_tokens=skip)
        old = len(self._tokenizer.decode(window[:-1], skip_special_tokens=skip).rstrip(_INCOMPLETE))
        matches = [(tail.find(text, max(0, old - len(text) + 1)), text) for text in req.sampling_params.stop]
        found = [match for match in matches if match[0] >= 0]
        return min(found)[1] if found else None


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise StartupError(f"{path} cannot be read as a tokenizer: {error}") from None
