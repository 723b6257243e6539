"""Names that the model does not have: needed by no engine (`is_derived`), or meant for another (`NearestName`).

State dicts may hold tensors that no engine needs: a model computes them from its configuration.

    model.layers.0.self_attn.rotary_emb.inv_freq      frequencies of the rotation, and what is computed from them
    transformer.h.0.attn.bias, attn.masked_bias       the causal mask, and the value behind it
    embeddings.position_ids                           0, 1, 2 ...

Checkpoints saved by old versions of transformers have them, and so have trainers that send every buffer.  transformers
ignores them when it loads.  A model that does have a tensor of such a name is asked first.

A search for the nearest name costs the same among ten names and among fifty thousand: only those are compared that lie
next to the wrong one when names are sorted from their start, or from their end, and some that have its numbers and its
last parts.
"""

from __future__ import annotations

import bisect
import difflib
import re
from collections.abc import Iterable, Sequence

_DERIVED = re.compile(
    r"(^|.*[._])(inv_freq|cos_cached|sin_cached|cos_sin_cache|masked_bias|position_ids)|(.*\.)?(attn|attention)\.bias"
)
MAX_LENGTH = 512
"""Characters of a wrong name; a longer one gets no hint."""
_NEIGHBOURS = 8
_LEAST_RATIO = 0.6
_PARTS = 2
"""Names whose last parts agree are meant for each other, whatever comes before: a prefix is the commonest mistake."""


def is_derived(name: str) -> bool:
    """Return whether a tensor of this name, which the model does not have, is computed from a configuration."""
    return _DERIVED.fullmatch(name) is not None


class NearestName:
    """An index of `names`, whose parts are separated by dots, that finds the nearest to a wrong one."""

    def __init__(self, names: Iterable[str]) -> None:
        self._from_start = sorted(names)
        self._from_end = sorted(name[::-1] for name in self._from_start)
        self._alike: dict[tuple[str, ...], list[str]] = {}
        for name in self._from_start:
            self._alike.setdefault(_numbers_and_end(name), []).append(name)

    def of(self, name: str) -> str | None:
        """Return the name that agrees in most parts from the end, then in most characters; None if none does."""
        if len(name) > MAX_LENGTH:
            return None
        near = _around(self._from_start, name)
        near |= {found[::-1] for found in _around(self._from_end, name[::-1])}
        near |= set(self._alike.get(_numbers_and_end(name), ())[:_NEIGHBOURS])
        matcher = difflib.SequenceMatcher(b=name, autojunk=False)
        best: tuple[int, float, str] | None = None
        for candidate in sorted(near):
            matcher.set_seq1(candidate)
            score = (_common_parts(candidate, name), matcher.ratio(), candidate)
            best = score if best is None or score[:2] > best[:2] else best
        return best[2] if best is not None and (best[0] >= _PARTS or best[1] >= _LEAST_RATIO) else None


def _around(ordered: Sequence[str], name: str) -> set[str]:
    at = bisect.bisect(ordered, name)
    return set(ordered[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS])


def _numbers_and_end(name: str) -> tuple[str, ...]:
    """Return the numbers of layer and expert, and the last parts of the name."""
    parts = name.split(".")
    return (*(part for part in parts if part.isdigit()), *parts[-_PARTS:])


def _common_parts(one: str, other: str) -> int:
    """Return how many parts from the end are the same."""
    count = 0
    for mine, its in zip(reversed(one.split(".")), reversed(other.split("."))):
        if mine != its:
            break
        count += 1
    return count
