"""Answers, and records of the weights in force, that are wrong in one way each.  The judge must catch every one.

A variant takes a right sample and the known contents, and returns both with its fault, or None if it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.soak.known import Known
from tests.soak.samples import Epoch, Sample, Span

Faulty = tuple[Sample, Known] | None
Variant = Callable[[Sample, Known], Faulty]

ENOUGH = 6  # tokens: fewer may look right by chance


def other_weights(sample: Sample, known: Known) -> Faulty:
    """Replace the tensors of the reference by another version's."""
    mine, other = _two_epochs(sample, known)
    return None if other is None else (sample, _with(known, mine, dict(known.contents[other])))


def a_mixture(sample: Sample, known: Known) -> Faulty:
    """Replace every second tensor of the reference by another version's."""
    mine, other = _two_epochs(sample, known)
    if other is None:
        return None
    names = sorted(known.contents[mine])[::2]
    mixed = {**known.contents[mine], **{name: known.contents[other][name] for name in names}}
    return sample, _with(known, mine, mixed)


def another_version(sample: Sample, known: Known) -> Faulty:
    """Make all spans name a version that was in force, but not for this sample."""
    _, other = _two_epochs(sample, known)
    if other is None or len({span.label for span in sample.row_spans}) > 1:
        return None
    label = min(known.labels[other])
    said = {name: _relabelled(getattr(sample, name), label, other) for name in SPANS}
    return replace(sample, **said, oldest=Span(label, other, 0, 1)), known


def an_unknown_version(sample: Sample, known: Known) -> Faulty:
    return replace(sample, token_spans=_relabelled(sample.token_spans, "nobody's", None)), known


def shifted_spans(sample: Sample, known: Known) -> Faulty:
    """Shift the spans, so that they claim the first token of the second version for the first one."""
    spans, rows = sample.token_spans, sample.row_spans
    if len(spans) != 2 or spans[1].end - spans[1].start < 2 or len(rows) < 2 or _contents_equal(spans, known):
        return None
    moved = spans[0].end + len(sample.prompt_ids) - 1
    if rows[-1].start != moved:
        return None
    tokens = (replace(spans[0], end=spans[0].end + 1), replace(spans[1], start=spans[1].start + 1))
    rows = (*rows[:-2], replace(rows[-2], end=moved + 1), replace(rows[-1], start=moved + 1))
    return replace(sample, token_spans=tokens, row_spans=rows), known


def new_kv(sample: Sample, known: Known) -> Faulty:
    """Make the spans state that the prompt's KV is as new as the last token."""
    last = sample.token_spans[-1]
    if sample.retractions or sample.prompt_spans[0].epoch == last.epoch:
        return None
    return replace(sample, prompt_spans=_relabelled(sample.prompt_spans, last.label, last.epoch)), known


def young_kv(sample: Sample, known: Known) -> Faulty:
    """Make the answer state that the oldest KV is as new as the last token."""
    last = sample.token_spans[-1]
    if sample.retractions or sample.oldest is None or sample.oldest.epoch == last.epoch:
        return None
    return replace(sample, oldest=last), known


def too_old_kv(sample: Sample, known: Known) -> Faulty:
    """Change the request so that it allows no KV older than its tokens."""
    last = sample.token_spans[-1]
    kept = not sample.retractions and sample.prompt_spans[-1].epoch != last.epoch
    return (replace(sample, lag=0), known) if kept else None


def an_untold_retraction(sample: Sample, known: Known) -> Faulty:
    """Hide that KV was computed again under other weights: the answer states no retraction."""
    first, last = sample.row_spans[0], sample.token_spans[-1]
    again = sample.retractions and last.label != first.label and sample.prompt_spans[0].label != first.label
    if not again or last.start > len(sample.output_ids) - ENOUGH:
        return None
    count = len(sample.prompt_ids)
    prompt = [replace(span, end=min(span.end, count)) for span in sample.row_spans if span.start < count]
    return replace(sample, retractions=0, prompt_spans=tuple(prompt)), known


def a_dropped_row(sample: Sample, known: Known) -> Faulty:
    spans = [replace(span, end=min(span.end, len(sample.rows) - 1)) for span in sample.row_spans]
    return replace(sample, rows=sample.rows[:-1], row_spans=tuple(s for s in spans if s.end > s.start)), known


def a_row_of_zeros(sample: Sample, known: Known) -> Faulty:
    rows = sample.rows.copy()
    rows[len(rows) // 2] = np.arange(rows.shape[-1])  # ids that a row may have: the reader would refuse zeros
    return None if np.array_equal(rows, sample.rows) else (replace(sample, rows=rows), known)


def the_row_before(sample: Sample, known: Known) -> Faulty:
    rows = sample.rows.copy()
    rows[-1] = rows[-2]
    return None if np.array_equal(rows, sample.rows) else (replace(sample, rows=rows), known)


def another_token(sample: Sample, known: Known) -> Faulty:
    ids = sample.output_ids.copy()
    ids[1] = (ids[1] + 1) % 320
    return replace(sample, output_ids=ids), known


def another_draw(sample: Sample, known: Known) -> Faulty:
    """Change the seed that was asked for."""
    return None if sample.params["temperature"] == 0 else (replace(sample, seed=sample.seed + 1), known)


def a_log_probability(sample: Sample, known: Known) -> Faulty:
    values = sample.logprobs.copy()
    values[len(values) // 2] += 3e-3
    return replace(sample, logprobs=values), known


def a_prompt_log_probability(sample: Sample, known: Known) -> Faulty:
    values = sample.prompt_logprobs.copy()
    if len(values) < 2:
        return None
    values[1] = (values[1] or 0.0) + 3e-3
    return replace(sample, prompt_logprobs=values), known


SPANS = ("token_spans", "prompt_spans", "row_spans", "scored_spans")
WRONG_VARIANTS: dict[str, Variant] = {
    variant.__name__: variant
    for variant in (
        other_weights,
        a_mixture,
        another_version,
        an_unknown_version,
        shifted_spans,
        new_kv,
        young_kv,
        too_old_kv,
        an_untold_retraction,
        a_dropped_row,
        a_row_of_zeros,
        the_row_before,
        another_token,
        another_draw,
        a_log_probability,
        a_prompt_log_probability,
    )
}


def _two_epochs(sample: Sample, known: Known) -> tuple[Epoch, Epoch | None]:
    """Return the epoch of the last token, and one of other content."""
    mine = known.epochs_of(sample.token_spans[-1], "tokens")[-1]
    others = [epoch for epoch in known.contents if not _equal(known, epoch, mine)]
    return mine, others[0] if others else None


def _contents_equal(spans: tuple[Span, ...], known: Known) -> bool:
    one, other = (known.epochs_of(span, "tokens")[-1] for span in spans)
    return _equal(known, one, other)


def _equal(known: Known, one: Epoch, other: Epoch) -> bool:
    return all(np.array_equal(tensor, known.contents[other][name]) for name, tensor in known.contents[one].items())


def _relabelled(spans: tuple[Span, ...], label: str, epoch: Epoch | None) -> tuple[Span, ...]:
    """Change the label of spans, and their epoch if they name one: row spans do not."""
    return tuple(replace(span, label=label, epoch=None if span.epoch is None else epoch) for span in spans)


def _with(known: Known, epoch: Epoch, content: dict) -> Known:
    changed = Known()
    changed.contents = {**known.contents, epoch: content}
    changed.labels = known.labels
    return changed
