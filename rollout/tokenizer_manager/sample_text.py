"""`SampleText`: the text of a sample, decoded as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.text.detokenizer import IncrementalDetokenizer, final_text
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager.sample import SampleRecord

_ONE_BY_ONE = 16  # tokens: more than a detokenizer leaves undecided in a text


class SampleText:
    """The text of one record, decoded as far as its tokens have come."""

    def __init__(self, record: SampleRecord, tokenizer: Tokenizer, kept_ids: frozenset[int] = frozenset()) -> None:
        params = record.source.sampling_params
        self._record = record
        self._trim = not params.no_stop_trim
        self._final: str | None = None
        self._detokenizer = IncrementalDetokenizer(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens, kept_ids=kept_ids),
            params.stop if self._trim else (),
        )

    def update(self) -> str:
        """Return the text to show now: never shorter than before, never part of a character or of a stop string."""
        if self._final is not None:
            return self._final
        finished = self._record.finished
        pending = self._record.output_ids[self._detokenizer.num_fed :]
        if finished is None:
            self._feed(pending)
            return self._detokenizer.shown
        matched = finished.reason.matched if finished.reason.type == "stop" else None
        self._final = final_text(self._detokenizer, pending, matched, trim=self._trim)
        return self._final

    def begin_at(self, count: int) -> int:
        """Decode the first `count` tokens of a text that has none yet, and return how many characters they show.

        The last token shows all that was held back, if it came with the end.
        """
        ids = self._record.output_ids
        if self._record.finished is not None and count == len(ids) and not self._record.ends_alone:
            return len(self.update())
        self._feed(ids[:count])
        return len(self._detokenizer.shown)

    def _feed(self, token_ids: Sequence[int]) -> None:
        """Add tokens, the last ones one by one, so that the text does not depend on how many came at once.

        Bytes of a character and half of the next one, in one piece, are no character for some decoders.
        """
        first = max(len(token_ids) - _ONE_BY_ONE, 0)
        self._detokenizer.feed(token_ids[:first])
        for token_id in token_ids[first:]:
            self._detokenizer.feed([token_id])
