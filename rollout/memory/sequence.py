"""`CachedSequence`: the tokens of a request, and the lengths that the memory holds.

Three lengths state its progress over its tokens `prompt + output`:

    0 <= cached_len <= recorded_len <= device_len <= num_tokens

    |-- cached_len --|                        tokens whose slots the prefix cache owns (locked for this sequence)
    |------ device_len ------|                tokens whose KV was computed, or is by a step in flight
    |------------ num_tokens ------------|    prompt and output that have reached the host

A sequence that decodes has `device_len == num_tokens - 1` between steps, and up to one more for each of its steps in
flight.  `device_len` is counted as steps are launched, not derived from tokens that the host may not have.  A
retraction sets `cached_len` and `device_len` to 0 and leaves the tokens.
"""

from __future__ import annotations

import numpy as np

from rollout.core.prompt import Prompt
from rollout.memory.radix_node import Namespace, RadixNode


class StepCount:
    """The steps that a decode batch has launched: the KV of each of its sequences has grown by as many tokens."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class CachedSequence:
    """See the module docstring.  The cache manager changes all but the tokens; steps add to `device_len`.

    `output_ids` is the live list.  `pool_index` is the row in the slot table, -1 while it holds no KV.  `namespace` is
    set when it first takes KV, and again after a retraction.  `prefix_node` ends the tokens of `cached_len`.
    """

    __slots__ = (
        "_device_len",
        "_num_steps",
        "cached_len",
        "namespace",
        "output_ids",
        "pool_index",
        "prefix_node",
        "prompt",
    )

    def __init__(self, prompt: Prompt, output_ids: list[int]) -> None:
        self.prompt = prompt
        self.output_ids = output_ids
        self.namespace: Namespace | None = None
        self.prefix_node: RadixNode | None = None
        self.pool_index = -1
        self.cached_len = 0
        self._device_len = 0
        self._num_steps: StepCount | None = None  # of the decode batch that it is in

    @property
    def prompt_len(self) -> int:
        return len(self.prompt.ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.ids) + len(self.output_ids)

    @property
    def device_len(self) -> int:
        """Tokens whose KV was computed, or is by a step in flight."""
        return self._device_len if self._num_steps is None else self._device_len + self._num_steps.value

    @device_len.setter
    def device_len(self, value: int) -> None:
        assert self._num_steps is None, "the decode batch counts the tokens of its sequences"
        self._device_len = value

    def begin_decoding(self, num_steps: StepCount) -> None:
        """Let every step that `num_steps` counts from now on compute one more token."""
        self.device_len -= num_steps.value
        self._num_steps = num_steps

    def grow(self, count: int) -> None:
        """Count the KV of `count` more tokens, in addition to the steps that its decode batch counts."""
        self._device_len += count

    def end_decoding(self) -> None:
        self._device_len, self._num_steps = self.device_len, None

    @property
    def recorded_len(self) -> int:
        """The tokens of `device_len` that the host knows.

        Only a step in flight computes the KV of the newest output token and of later ones.  Tokens in the prefix cache
        are an exception: the cache takes only known tokens.  A sequence that was retracted comes back with all its
        tokens computed and shared, and may end without another one.
        """
        return max(self.cached_len, min(self.device_len, self.num_tokens - bool(self.output_ids)))

    @property
    def matchable_len(self) -> int:
        """The longest prefix that a cache hit may skip: the last token is always computed, as it predicts the next."""
        return self.num_tokens - 1

    def token_array(self, start: int, end: int) -> np.ndarray:
        """Return the known token ids of positions `start .. end - 1`, int64, which the caller must not change."""
        prompt = self.prompt.array
        if end <= len(prompt):
            return prompt[start:end]
        output = self.output_ids[max(start - len(prompt), 0) : end - len(prompt)]
        return np.concatenate([prompt[start:], np.fromiter(output, np.int64, len(output))])
