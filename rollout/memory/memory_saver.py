"""`MemorySaver`: gives the memory of whole groups of tensors back to the system, and keeps their addresses.

So kernels, views, loaders and captured graphs that hold an address stay valid.  `host_pages` (a CPU) and
`device_pages` (CUDA) give pages back and take them again.

    release(tag)    content -> [kept copy in an unnamed file] -> pages returned
    resume(tag)     pages, zeros -> [kept copy -> content, checked]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch

from rollout.core.errors import LockstepError
from rollout.core.messages.io_struct import MemoryTag
from rollout.memory.host_pages import HostPages, MemoryPages, Span, spans_of
from weight_sync.unnamed_file import UnnamedFile

TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)
Group = MemoryTag | Literal["draft"]  # the weights of a draft are released with the model's


class KeptCopyError(LockstepError):
    """A copy of released content could not be written, or has changed since."""


class KeptCopy:
    """The bytes of some storages in an unnamed file of the temporary folder ($TMPDIR), deleted when closed."""

    def __init__(self, pages: MemoryPages, spans: Sequence[Span]) -> None:
        """Write the copy.  Raises `KeptCopyError` if it cannot be written."""
        self._pages, self._spans = pages, spans
        self._file: UnnamedFile | None = None
        try:
            self._file = UnnamedFile("lockstep-weights-")
            self._entries = [self._file.append(part) for span in spans for part in pages.read(span)]
        except OSError as error:
            self.close()
            raise KeptCopyError(f"no copy of the weights could be kept: {error}") from error

    def restore(self) -> None:
        """Write the bytes back to their storages.  Raises `KeptCopyError`; the contents are undefined then."""
        assert self._file is not None
        parts = (part for span in self._spans for part in self._pages.fill(span))
        try:
            for part, entry in zip(parts, self._entries, strict=True):
                self._file.read(entry, part)
        except OSError as error:
            raise KeptCopyError(f"the kept copy of the weights cannot be read: {error}") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class MemorySaver:
    """Releases and provides the memory of the tensors of each tag, and of a draft's weights.

    `tensors[tag]` are the tensors of a tag; a tag without tensors holds no memory here.  `pages` belong to the tensors'
    device.  Raises `StartupError` if the pages of a tensor cannot go back.
    """

    def __init__(self, tensors: Mapping[Group, Sequence[torch.Tensor]], pages: MemoryPages | None = None) -> None:
        self._pages: MemoryPages = HostPages() if pages is None else pages
        for group in tensors.values():
            self._pages.check(group)
        self._tensors = tensors  # keeps the storages alive
        self._spans = {tag: spans_of(group) for tag, group in tensors.items()}
        self._copies: dict[Group, KeptCopy] = {}

    def nbytes(self, tag: Group) -> int:
        """Return the bytes of the storages of `tag`."""
        return sum(span.nbytes for span in self._spans.get(tag, ()))

    def keep_copy(self, tag: Group) -> None:
        """Copy the content to a file, for `restore`.  Raises `KeptCopyError`; nothing changed."""
        self.drop_copy(tag)
        self._copies[tag] = KeptCopy(self._pages, self._spans.get(tag, ()))

    def has_copy(self, tag: Group) -> bool:
        return tag in self._copies

    def drop_copy(self, tag: Group) -> None:
        copy = self._copies.pop(tag, None)
        if copy is not None:
            copy.close()

    def restore(self, tag: Group) -> None:
        """Put the kept copy back, bit for bit; it stays until it is dropped.

        Raises `KeptCopyError`; content and copy are lost then.
        """
        try:
            self._copies[tag].restore()
        except KeptCopyError:
            self.drop_copy(tag)
            raise

    def discard(self, *tags: Group) -> None:
        """Give the pages of `tags` back to the system.  Their content is lost."""
        self._pages.discard([span for tag in tags for span in self._spans.get(tag, ())])

    def provide(self, tags: Sequence[Group]) -> None:
        """Take memory for all these tags or none; returned memory holds zeros now.  Raises `MemoryTakenError`."""
        self._pages.provide([span for tag in tags for span in self._spans.get(tag, ())])

    def is_provided(self, tag: Group) -> bool:
        """Return whether the memory of `tag` may be read and written."""
        return self._pages.is_provided(self._spans.get(tag, ()))
