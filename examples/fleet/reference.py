"""An engine in this process that scores samples again, under the weights of each version.

It takes the weights from what was published, so that it shares nothing with the engines but the checkpoint.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from capture.codec import decode_compact
from examples.fleet.check import Score, Scored
from examples.fleet.sample import Sample
from rollout.server.engine import Engine
from weight_sync.delta.local_checkpoint import pull

BATCH = 64
LOCK_S = 10.0


def score_again(
    samples: Sequence[Sample],
    versions: Iterable[int],
    checkpoint: Path,
    published: Path,
    folder: Path,
    progress: Callable[[int, int], None],
) -> Iterator[Scored]:
    """Yield every span of every sample with its scores under its version, and under the version before if there is one.

    `folder`: a new one, for the reference's weights.  `progress(done, total)` counts versions.
    """
    versions = sorted(versions)
    for done, version in enumerate(versions):
        wanted = [
            (sample, number)
            for sample in samples
            for number, span in enumerate(sample.spans)
            if version in (span.version, span.version - 1)
        ]
        if wanted:
            pull(folder, checkpoint, published, version, timeout_s=LOCK_S)
            yield from _score(wanted, version, folder)
        progress(done + 1, len(versions))


def _score(wanted: Sequence[tuple[Sample, int]], version: int, weights: Path) -> Iterator[Scored]:
    engine = Engine(
        model_path=str(weights), enable_return_routed_experts=True, skip_tokenizer_init=True, max_total_tokens=1 << 16,
        num_threads=1,
    )  # fmt: skip
    try:
        for first in range(0, len(wanted), BATCH):
            batch = wanted[first : first + BATCH]
            for (sample, number), score in zip(batch, _scores(engine, batch)):
                yield Scored(sample, number, version, score)
    finally:
        engine.close()


def _scores(engine: Engine, batch: Sequence[tuple[Sample, int]]) -> Iterator[Score]:
    """Yield the score of each sample's tokens up to the end of the span."""
    sequences = [[*sample.prompt.token_ids, *sample.output_ids[: sample.spans[number].end]] for sample, number in batch]
    answers = engine.generate(
        input_ids=sequences,
        sampling_params={"max_new_tokens": 0, "temperature": 1.0},
        return_logprob=True,
        logprob_start_len=0,
        return_routed_experts=True,
        routed_experts_format="compact",
    )
    assert isinstance(answers, list)
    for (sample, _), answer in zip(batch, answers):
        entries = answer["meta_info"]["input_token_logprobs"][len(sample.prompt.token_ids) :]
        routed = decode_compact(base64.b64decode(answer["meta_info"]["routed_experts"]))
        yield Score([entry[0] for entry in entries], routed.logical_ids_TLK)
