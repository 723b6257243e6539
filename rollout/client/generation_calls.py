"""Methods that any engine can answer: a client calls its server, and a fleet calls the engine that it chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

from rollout.client import generation
from rollout.client.method import method
from rollout.client.partial import join, rest_of
from rollout.client.pooling import PoolingCalls
from rollout.client.retries import repeated
from rollout.client.scoring import ScoreCalls
from rollout.client.types import GenerateOptions, GenerationOutput
from rollout.client.wire import Call, Steps, field_of
from rollout.core.sampling_params import sampling_params_from_dict


class GenerationCalls(ScoreCalls, PoolingCalls):
    """Calls for samples, scores, embeddings and classes, and from text to ids and back."""

    @method
    def generate(
        self, prompt: str | Sequence[str] | None = None, **options: Unpack[GenerateOptions]
    ) -> Call[GenerationOutput | list[GenerationOutput]]:
        """Generate samples for one prompt (text or `input_ids`) or a batch; for a batch or n > 1 a list, by prompt.

        Cancelling it, or Ctrl-C, closes the connection, and the server aborts the request.
        """
        return generation.generate(prompt, options, self._layout)

    @method
    def resume(self, output: GenerationOutput, **options: Unpack[GenerateOptions]) -> Steps[GenerationOutput]:
        """Go on with a sample aborted by a pause, an abort or a server that stopped, and return its whole record.

        `options`: the options that it was generated with.  The ids of its prompt are its `input_ids`, or
        `output.prompt_ids` if it was asked with `return_prompt_token_ids`; sample i of n has its own `sampling_seed`,
        the first one's plus i.  The part in `output` is kept as it is.  The result may be
        aborted and resumed again.

        Raises `BadRequest` for a sample that cannot be continued (see `rollout.client.partial`), and `JoinError`
        if the answer does not belong to it.
        """
        call = generation.generate(None, rest_of(output, options), self._layout)
        rest = yield from repeated(call, self._retry_s)
        assert isinstance(rest, GenerationOutput), "one prompt, one sample"
        joined = join(output, rest)
        if joined.text is None or not output.output_ids or not rest.output_ids:
            return joined
        params, _ = sampling_params_from_dict(cast(dict[str, Any], options.get("sampling_params") or {}))
        # A character may have its bytes in both parts.
        text = yield from repeated(_detokenize(joined.output_ids, params.skip_special_tokens), self._retry_s)
        matched = None if joined.finish_reason is None else joined.finish_reason.matched
        if isinstance(matched, str) and not params.no_stop_trim:
            text = text[: text.rfind(matched)] if matched in text else text
        return replace(joined, text=text)

    @method
    def tokenize(self, prompt: str, add_special_tokens: bool = True) -> Call[list[int]]:
        """Return the token ids of `prompt`."""
        body = {"prompt": prompt, "add_special_tokens": add_special_tokens}
        return Call("POST", "/tokenize", field_of("tokens", list), body, retry="always")

    @method
    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> Call[str]:
        """Return the text of token ids."""
        return _detokenize(tokens, skip_special_tokens)


def _detokenize(tokens: Sequence[int], skip_special_tokens: bool) -> Call[str]:
    body = {"tokens": list(tokens), "skip_special_tokens": skip_special_tokens}
    return Call("POST", "/detokenize", field_of("text", str), body, retry="always")
