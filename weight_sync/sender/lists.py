"""The lists of names, dtypes and shapes as engines get them, made once and sent often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.digest_plan import DigestPlan, hex_digits, split_digits
from weight_sync.json_lists import JsonList
from weight_sync.tensor_meta import TensorMeta, dtype_name


@dataclass(frozen=True)
class TensorLists:
    """Parallel lists, one entry a tensor.  `boxes` None: all tensors are whole."""

    names: JsonList
    dtypes: JsonList
    shapes: JsonList
    boxes: JsonList | None = None

    @classmethod
    def of(cls, metas: Sequence[TensorMeta]) -> TensorLists:
        return cls(
            JsonList(meta.name for meta in metas),
            JsonList(dtype_name(meta.dtype) for meta in metas),
            JsonList(list(meta.shape) for meta in metas),
            JsonList(meta.box for meta in metas) if any(meta.box for meta in metas) else None,
        )


@dataclass(frozen=True)
class Fingerprints:
    """F of the tensors of a refresh, in their order: uint64 [n]; and bool [n]: of which it is known here."""

    values: npt.NDArray[np.uint64]
    known: npt.NDArray[np.bool_]

    def by_name(self, names: Sequence[str]) -> dict[str, str]:
        """Return the wire form of each that is known."""
        texts = split_digits(hex_digits(self.values))
        if self.known.all():
            return dict(zip(names, texts, strict=True))
        return {name: text for name, text, known in zip(names, texts, self.known.tolist(), strict=True) if known}


class Contents:
    """Everything that a refresh sends: `lists` in the order in which it came, and the bytes of one copy."""

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self.lists = TensorLists.of(metas)
        self.num_bytes = sum(meta.nbytes for meta in metas)
        self._digest = DigestPlan(metas)

    def digest(self, fingerprints: Fingerprints) -> str | None:
        """Return `fingerprint.digest`; None unless all fingerprints are known here."""
        return self._digest.digest(fingerprints.values) if fingerprints.known.all() else None


class Manifest:
    """The manifest of a refresh, in the two forms that an engine may take."""

    def __init__(self, lists: TensorLists, fingerprints: Fingerprints) -> None:
        self._lists, self._fingerprints = lists, fingerprints

    def as_lists(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the form that costs nothing a tensor; entries where some fingerprints are not known."""
        if not self._fingerprints.known.all():
            return self.as_entries()
        lists = {"names": self._lists.names, "dtypes": self._lists.dtypes, "shapes": self._lists.shapes}
        return lists | {"fingerprints": hex_digits(self._fingerprints.values)}

    def as_entries(self) -> list[dict[str, Any]]:
        """Return an entry a tensor."""
        lists = self._lists
        texts: Mapping[str, str] = self._fingerprints.by_name(lists.names)
        return [
            {"name": name, "dtype": dtype, "shape": shape, "fingerprint": texts.get(name)}
            for name, dtype, shape in zip(lists.names, lists.dtypes, lists.shapes, strict=True)
        ]
