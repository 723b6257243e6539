"""`TensorList`: the tensors of a delta frame by name, dtype and shape, which are the same in each delta of a sender."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weight_sync.delta.compression import compress
from weight_sync.errors import ContentError
from weight_sync.tensor_meta import MetaParser, TensorMeta, dtype_name

KnownLists = Callable[[bytes, "Callable[[], TensorList]"], "TensorList"]
"""Returns the list of a key, made if it is not known."""


@dataclass(frozen=True, eq=False)
class TensorList:
    """T tensors, each name once.  `key`: equal keys mean equal lists."""

    metas: Sequence[TensorMeta]
    key: bytes = b""

    @functools.cached_property
    def names(self) -> list[str]:
        return [meta.name for meta in self.metas]

    @functools.cached_property
    def numels(self) -> np.ndarray:
        """The elements of each tensor, int64 [T]."""
        return np.array([meta.numel for meta in self.metas], dtype=np.int64)

    @functools.cached_property
    def itemsizes(self) -> np.ndarray:
        """The bytes of an element of each tensor, int64 [T]."""
        return np.array([meta.dtype.itemsize for meta in self.metas], dtype=np.int64)

    @functools.cached_property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(meta.nbytes for meta in self.metas)

    @functools.cached_property
    def written(self) -> bytes:
        """The list as JSON: name, dtype and shape of each tensor."""
        described = [[meta.name, dtype_name(meta.dtype), list(meta.shape)] for meta in self.metas]
        return json.dumps(described, separators=(",", ":")).encode()

    @functools.cached_property
    def packed(self) -> bytes:
        """The list as `written`, by zstd."""
        return compress(self.written, level=3)

    @classmethod
    def of(cls, items: Any, key: bytes = b"") -> TensorList:
        """Read the parsed JSON of a list.  Raises `ContentError`, `WeightRequestError`."""
        parse, metas = MetaParser(), []
        for item in items if isinstance(items, list) else [None]:
            if not (isinstance(item, list) and len(item) == 3 and isinstance(item[2], list)):
                raise ContentError("the description of a tensor in a delta frame is malformed")
            metas.append(parse(*item))
        if len({meta.name for meta in metas}) != len(metas):
            raise ContentError("a delta frame holds a tensor twice")
        return cls(metas, key)


def read_json(text: bytes) -> Any:
    """Parse the JSON in a frame.  Raises `ContentError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContentError(f"the index of a delta frame is not JSON: {str(error)[:200]}") from None
