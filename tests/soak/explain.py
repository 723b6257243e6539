"""The weights that explain a sample: its answer names them, and it is recomputed in float64 from what was really sent.

Samples of one prompt are computed together: the prompt once, their tokens as branches behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from rollout.core.specs.model_config import ModelConfig
from tests.history.reference import Branches, MixedOutput, MixedReference
from tests.soak.known import Known
from tests.soak.reading import TIE, Explanation, Reading
from tests.soak.samples import Epoch, Sample, Violation, places

MAX_TOGETHER = 512  # tokens behind a prompt: attention is computed whole


class Explainer:
    """Explains samples by the contents of `known`."""

    def __init__(self, config: ModelConfig, known: Known) -> None:
        self._known = known
        self._reference = MixedReference(config, known.contents)

    def explain(self, samples: Sequence[Sample]) -> list[Explanation | Violation]:
        """Explain samples of one prompt."""
        found: list[Explanation | Violation] = [Violation("nothing explains it")] * len(samples)
        readings: list[list[Reading]] = []
        for number, sample in enumerate(samples):
            try:
                readings.append([Reading(self._reference, self._known, sample, each) for each in self._epochs(sample)])
            except Violation as violation:
                readings.append([])
                found[number] = violation
        first = {id(several[0]): number for number, several in enumerate(readings) if several}
        for pack in _packs([several[0] for several in readings if several]):
            for reading, output in zip(pack, _compute_together(self._reference, pack)):
                number = first[id(reading)]
                found[number] = _first_right(readings[number], output)
        return found

    def explain_as(self, sample: Sample, epoch: Epoch) -> Explanation:
        """Explain the sample as if all of it were of one epoch, against its own claims.  Raises `Violation`."""
        return Reading(self._reference, self._known, sample, [epoch] * len(sample.rows), says_whose=False).explain()

    def _epochs(self, sample: Sample) -> Iterator[list[Epoch]]:
        """Yield the epochs of positions with a row, by the spans of rows; they must agree with the spans of tokens.

        A label that was given to several contents gives several readings.  Raises `Violation`.
        """
        tokens = self._token_epochs(sample)
        num_prompt, num_rows = len(sample.prompt_ids), len(sample.rows)
        if (tokens and num_rows != num_prompt + len(tokens) - 1) or num_rows > num_prompt + max(len(tokens) - 1, 0):
            raise Violation(f"{num_rows} rows of experts for {num_prompt} and {len(tokens)} tokens")
        rows = places(sample.row_spans, num_rows, "rows")
        for index, span in enumerate(rows[num_prompt:], start=1):
            if tokens[index] not in self._known.epochs_of(span, "rows"):
                raise Violation(
                    f"token {index} is of epoch {tokens[index]}, the row that it was sampled with of {span}"
                )
        spans = list(dict.fromkeys(rows[:num_prompt]))
        for meaning in product(*[self._known.epochs_of(span, "rows") for span in spans]):
            of_span = dict(zip(spans, meaning))
            yield [of_span[span] for span in rows[:num_prompt]] + tokens[1:]

    def _token_epochs(self, sample: Sample) -> list[Epoch]:
        """Return the epoch of each token: the newest of its label if the answer names no epoch."""
        spans = places(sample.token_spans, len(sample.output_ids), "tokens")
        epochs = [self._known.epochs_of(span, "tokens")[-1] for span in spans]
        if epochs != sorted(epochs):
            raise Violation(f"the epochs of tokens decrease: {sample.token_spans}")
        return epochs


def _first_right(readings: Sequence[Reading], output: MixedOutput) -> Explanation | Violation:
    last: Violation | None = None
    for number, reading in enumerate(readings):
        try:
            return reading.explain(output if number == 0 else None)
        except Violation as violation:
            last = violation  # the last reading has the newest content of a label
    assert last is not None
    return last


def _packs(readings: Sequence[Reading]) -> Iterator[list[Reading]]:
    """Yield readings whose prompts were computed alike, a few at a time."""
    alike: dict[object, list[Reading]] = {}
    for reading in readings:
        alike.setdefault(reading.prompt_facts, []).append(reading)
    for group in alike.values():
        pack: list[Reading] = []
        for reading in group:
            if pack and sum(each.num_own for each in pack) + reading.num_own > MAX_TOGETHER:
                yield pack
                pack = []
            pack.append(reading)
        yield pack


def _compute_together(reference: MixedReference, pack: Sequence[Reading]) -> Iterator[MixedOutput]:
    """Yield the forwards of each reading, computed together as if nothing had been retracted."""
    shared = len(pack[0].ids) - pack[0].num_own
    ids, epochs, rows = list(pack[0].ids[:shared]), list(pack[0].epochs[:shared]), [pack[0].rows[:shared]]
    for each in pack:
        ids += each.ids[shared:]
        epochs += each.epochs[shared:]
        rows.append(each.rows[shared:])
    branches = Branches.of(shared, [each.num_own for each in pack])
    output = reference.forward(ids, epochs, torch.cat(rows), TIE, branches)
    start = shared
    for each in pack:
        mine = torch.tensor([*range(shared), *range(start, start + each.num_own)], dtype=torch.int64)
        start += each.num_own
        yield MixedOutput(output.logits[mine], output.routes[mine], output.margin)
