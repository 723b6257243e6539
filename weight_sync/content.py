"""The known content of logical tensors: fingerprints of the tensors sent, and of the values held.

The two differ where weights are converted on their way: FP8 weights are held as their values, and an engine may
quantise what it is sent.  Manifests, bases and digests that a trainer states describe the tensors sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from weight_sync.fingerprint import digest
from weight_sync.tensor_meta import TensorMeta


class Content(NamedTuple):
    """One logical tensor: the tensors sent for it (two for an FP8 pair) with F of each, and F of the values held."""

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


class ContentBook:
    """The content of every serving tensor, where it is known: a cold load computes no fingerprints.

    A refresh knows the fingerprints of its tensors, so a full one names its content without another pass over memory.
    """

    def __init__(self, metas: Mapping[str, TensorMeta]) -> None:
        self._metas = metas
        self._known: dict[str, Content] = {}

    @property
    def digests(self) -> Digests:
        """The digests of the whole content."""
        return self.digests_after({})

    def digests_after(self, contents: Mapping[str, Content]) -> Digests:
        """Return `digests` as they will be once these contents are noted."""
        known = self._known | dict(contents)
        if known.keys() != self._metas.keys():
            return Digests(None, None)
        sent = [entry for content in known.values() for entry in content.sent]
        held = [(self._metas[name], content.held) for name, content in known.items()]
        of_sent = digest(sent)
        return Digests(of_sent, of_sent if sent == held else digest(held))

    def note(self, contents: Mapping[str, Content]) -> None:
        """Note that these tensors, by canonical name, now have this content."""
        assert contents.keys() <= self._metas.keys(), sorted(contents.keys() - self._metas.keys())
        self._known.update(contents)

    def note_live(self, fingerprints: Mapping[str, int]) -> None:
        """Note F of every tensor as memory holds it.  Where that is not what came of a refresh, nothing was ever sent:
        what is held counts as sent.
        """
        self.note({name: self._live(name, value) for name, value in fingerprints.items()})

    def _live(self, name: str, fingerprint: int) -> Content:
        known = self._known.get(name)
        if known is not None and known.held == fingerprint:
            return known
        return Content.plain(self._metas[name], fingerprint)


def by_name(contents: Iterable[Content]) -> dict[str, int]:
    """Return F of everything that was sent."""
    return {meta.name: fingerprint for content in contents for meta, fingerprint in content.sent}
