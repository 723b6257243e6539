"""The known content of logical tensors: fingerprints of the tensors sent, and of the values held.

The two differ where weights are converted on their way: FP8 weights are held as their values, and an engine may
quantise what it is sent.  Manifests, bases and digests that a trainer states describe the tensors sent.

Contents of many tensors are arrays by the tensors' numbers, so that a refresh of thousands of tensors notes them, and
names their digest, without a step for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from weight_sync.digest_plan import DigestPlan
from weight_sync.ledger import Numbers, TensorNumbers
from weight_sync.spans import DTYPE_CODES
from weight_sync.tensor_meta import DTYPES, TensorMeta

_DTYPES = tuple(DTYPES.values())


class Content(NamedTuple):
    """One logical tensor: the tensors sent for it (its parts, if it came in parts) with F of each, and F of the values
    held.
    """

    sent: tuple[tuple[TensorMeta, int], ...]
    held: int

    @classmethod
    def plain(cls, meta: TensorMeta, fingerprint: int) -> Content:
        """Return the content of a tensor that is held as it was sent."""
        return cls(((meta, fingerprint),), fingerprint)


class Digests(NamedTuple):
    """`fingerprint.digest` of the whole content; None while a tensor's fingerprint is not known."""

    sent: str | None = None
    held: str | None = None


class TensorTable(TensorNumbers):
    """The logical tensors of a model by number, and what is asked of all of them at once.

    `codes`: their dtypes, `num_bytes`: their sizes.
    """

    def __init__(self, metas: Mapping[str, TensorMeta]) -> None:
        super().__init__(metas)
        self.metas = tuple(metas.values())
        self.codes = np.array([DTYPE_CODES[meta.dtype] for meta in self.metas], dtype=np.uint8)
        self.num_bytes = np.array([meta.nbytes for meta in self.metas], dtype=np.int64)


class Contents:
    """The contents of some of the logical tensors of `table`.

    `codes`: the dtype in which a tensor was sent.  A tensor that was sent as more than one, or under another name, is
    in `_odd`, and its F as sent is not in the array.
    """

    def __init__(self, table: TensorTable) -> None:
        self._table = table
        count = len(table)
        self._is_known = np.zeros(count, dtype=np.bool_)
        self._codes = np.zeros(count, dtype=np.uint8)
        self._sent = np.zeros(count, dtype=np.uint64)
        self._held = np.zeros(count, dtype=np.uint64)
        self._odd: dict[int, Content] = {}

    @property
    def is_complete(self) -> bool:
        """True if all are known."""
        return bool(self._is_known.all())

    @property
    def is_as_sent(self) -> bool:
        """True if all tensors are held as they were sent."""
        same = np.array_equal(self._codes, self._table.codes) and np.array_equal(self._sent, self._held)
        return same and not self._odd

    def copy(self) -> Contents:
        """Return another object with the same contents."""
        other = Contents(self._table)
        for name in ("_is_known", "_codes", "_sent", "_held", "_odd"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def put_all(self, numbers: Numbers, codes: np.ndarray, sent: np.ndarray, held: np.ndarray) -> None:
        """Note tensors that were sent as one, in these dtypes; F as sent and as held, int64 or uint64."""
        for number in self._odd.keys() & numbers.tolist() if self._odd else ():
            del self._odd[number]
        self._is_known[numbers] = True
        self._codes[numbers] = codes
        self._sent[numbers] = sent.view(np.uint64)
        self._held[numbers] = held.view(np.uint64)

    def put(self, number: int, content: Content) -> None:
        """Note one tensor."""
        meta, ((first, fingerprint), *more) = self._table.metas[number], content.sent
        self._is_known[number] = True
        self._held[number] = content.held
        self._odd.pop(number, None)
        if more or (first.name, first.shape) != (meta.name, meta.shape):
            self._odd[number] = content
            return
        self._codes[number] = DTYPE_CODES[first.dtype]
        self._sent[number] = fingerprint

    def update(self, other: Contents) -> None:
        """Take the contents that `other` knows; they replace the ones here."""
        (numbers,) = other._is_known.nonzero()
        self.put_all(numbers, other._codes[numbers], other._sent[numbers], other._held[numbers])
        self._odd |= other._odd

    def plain(self) -> tuple[Numbers, np.ndarray, np.ndarray, np.ndarray]:
        """Return the tensors that were sent as one under their name: numbers, codes, F as sent and as held."""
        is_plain = self._is_known.copy()
        is_plain[list(self._odd)] = False
        (numbers,) = is_plain.nonzero()
        return numbers, self._codes[numbers], self._sent[numbers], self._held[numbers]

    def get(self, number: int) -> Content | None:
        """Return the content of one tensor, if it is known."""
        if not self._is_known[number]:
            return None
        if number in self._odd:
            return self._odd[number]
        meta, dtype = self._table.metas[number], _DTYPES[self._codes[number]]
        sent = meta if meta.dtype == dtype else meta._replace(dtype=dtype)
        return Content(((sent, int(self._sent[number])),), int(self._held[number]))

    def sent_form(self) -> tuple[bytes, tuple[tuple[TensorMeta, ...], ...]]:
        """Return what the lines of the digest of everything sent depend on, but for the fingerprints."""
        odd = sorted(self._odd.items())
        return self._codes.tobytes(), tuple(tuple(meta for meta, _ in content.sent) for _, content in odd)

    def sent_metas(self) -> list[TensorMeta]:
        """Return every tensor that was sent, in the order of `sent_values`."""
        found: list[TensorMeta] = []
        for number, meta in enumerate(self._table.metas):
            if number not in self._odd:
                dtype = _DTYPES[self._codes[number]]
                found.append(meta if meta.dtype == dtype else meta._replace(dtype=dtype))
        return found + [meta for _, content in sorted(self._odd.items()) for meta, _ in content.sent]

    def sent_values(self) -> np.ndarray:
        """Return F of every tensor that was sent, uint64."""
        if not self._odd:
            return self._sent
        odd = sorted(self._odd.items())
        more = [fingerprint for _, content in odd for _, fingerprint in content.sent]
        return np.concatenate([np.delete(self._sent, [number for number, _ in odd]), np.array(more, dtype=np.uint64)])

    @property
    def held_values(self) -> np.ndarray:
        """F of every tensor as it is held, uint64."""
        return self._held


class ContentBook:
    """The content of every serving tensor, where it is known: a cold load computes no fingerprints.

    A refresh knows the fingerprints of its tensors, so a full one names its content without another pass over memory.
    """

    def __init__(self, table: TensorTable) -> None:
        self._table = table
        self._known = Contents(table)
        self._held_lines: DigestPlan | None = None
        self._sent_lines: tuple[object, DigestPlan] | None = None  # with the form that they are of

    @property
    def digests(self) -> Digests:
        """The digests of the whole content."""
        return self._digests(self._known)

    def digests_after(self, contents: Contents) -> Digests:
        """Return `digests` as they will be once these contents are noted."""
        if contents.is_complete:
            return self._digests(contents)
        known = self._known.copy()
        known.update(contents)
        return self._digests(known)

    def note(self, contents: Contents) -> None:
        """Note that these tensors now have this content."""
        self._known.update(contents)

    def note_live(self, fingerprints: Mapping[str, int]) -> None:
        """Note F of every tensor as memory holds it.  Where that is not what came of a refresh, nothing was ever sent:
        what is held counts as sent.
        """
        for number, meta in enumerate(self._table.metas):
            known = self._known.get(number)
            value = fingerprints[meta.name]
            if known is None or known.held != value:
                self._known.put(number, Content.plain(meta, value))

    def _digests(self, known: Contents) -> Digests:
        if not known.is_complete:
            return Digests(None, None)
        if self._held_lines is None:
            self._held_lines = DigestPlan(self._table.metas)
        held = self._held_lines.digest(known.held_values)
        if known.is_as_sent:
            return Digests(held, held)
        form = known.sent_form()
        if self._sent_lines is None or self._sent_lines[0] != form:
            self._sent_lines = form, DigestPlan(known.sent_metas())
        return Digests(self._sent_lines[1].digest(known.sent_values()), held)


def by_name(contents: Iterable[Content]) -> dict[str, int]:
    """Return F of everything that was sent."""
    return {meta.name: fingerprint for content in contents for meta, fingerprint in content.sent}
