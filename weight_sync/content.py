"""`ContentBook`: the fingerprint of every logical tensor in force, as far as it is known, and so the version's digest.

A refresh knows the fingerprints of what it brings, so a full one names its content without another pass over memory,
and a partial one too where the rest was known.
Knows names and integers.  Does not know where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Mapping

from weight_sync.fingerprint import digest
from weight_sync.tensor_meta import TensorMeta


class ContentBook:
    """Empty at first: a cold load computes nothing."""

    def __init__(self, metas: Mapping[str, TensorMeta]) -> None:
        self._metas = metas
        self._known: dict[str, int] = {}

    @property
    def digest(self) -> str | None:
        """`fingerprint.digest` of the whole content; None while a tensor's fingerprint is not known."""
        return self.digest_after({})

    def digest_after(self, fingerprints: Mapping[str, int]) -> str | None:
        """`digest` as it will be once these are noted."""
        content = self._known | dict(fingerprints)
        if content.keys() != self._metas.keys():
            return None
        return digest((self._metas[name], value) for name, value in content.items())

    def note(self, fingerprints: Mapping[str, int]) -> None:
        """These tensors, by canonical name, now have this content."""
        assert fingerprints.keys() <= self._metas.keys(), sorted(fingerprints.keys() - self._metas.keys())
        self._known.update(fingerprints)
