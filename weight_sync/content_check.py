"""`check_content`: tensors that came, checked before any of them is stored: finite, with the fingerprints stated.

Tensors that lie end to end, as in a bucket, are checked together: a pass over many megabytes costs less than a pass
over each of a thousand tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from weight_sync.errors import ContentError, listed
from weight_sync.fingerprint import fingerprints_apart, fingerprints_end_to_end, wrong_fingerprint
from weight_sync.fingerprint_words import BLOCK

Named = Sequence[tuple[str, torch.Tensor]]


class Fingerprints(Protocol):
    """Fingerprints by name, such as a dict."""

    def get(self, name: str, default: int, /) -> int: ...


def check_content(named: Named, stated: Fingerprints) -> dict[str, int]:
    """Check logical tensors of one bucket against the fingerprints stated of them, where there are any; return theirs.

    Raises `ContentError` for all that are not finite, or for the first whose fingerprint differs.
    """
    found: dict[str, int] = {}
    not_finite: list[str] = []
    for run in _runs(named):
        values, finite = _inspect(run)
        found.update(zip((name for name, _ in run), values, strict=True))
        if not finite:
            not_finite += [name for name, tensor in run if not is_finite(tensor)]
    if not_finite:
        raise ContentError(f"values that are not finite in {listed(not_finite)}")
    return matching(found, stated)


def matching(found: dict[str, int], stated: Fingerprints) -> dict[str, int]:
    """Return the fingerprints found.  Raises `ContentError` for the first that is not the one stated, where one is."""
    for name, actual in found.items():
        expected = stated.get(name, actual)
        if actual != expected:
            raise ContentError(wrong_fingerprint(name, actual, expected))
    return found


def _inspect(run: Named) -> tuple[list[int], bool]:
    """Return the fingerprints of the tensors of a run, and whether all values are finite."""
    finite: bool | None = None
    if all(tensor.numel() and tensor.numel() % BLOCK == 0 for _, tensor in run) and run[0][1].is_contiguous():
        values, finite = fingerprints_end_to_end(_flat(run).view(-1), [tensor.numel() for _, tensor in run])
    else:
        values, finite = fingerprints_apart([tensor for _, tensor in run])
    return values, is_finite(_flat(run)) if finite is None else finite


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite, in one pass without temporaries: NaN propagates through min and max."""
    if tensor.numel() == 0 or not tensor.dtype.is_floating_point:
        return True
    if tensor.dtype.itemsize == 1:  # float8 has no min or max
        return all(bool(chunk.to(torch.float32).isfinite().all()) for chunk in tensor.reshape(-1).split(1 << 20))
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _runs(named: Named) -> Iterator[Named]:
    """Yield neighbours in the list that lie end to end in one storage, in one dtype; whole blocks apart from other
    sizes.
    """
    run: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named:
        if run and not _follows(run[-1][1], tensor):
            yield run
            run = []
        run.append((name, tensor))
    if run:
        yield run


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.numel() > 0
        and other.is_contiguous()
        and one.is_contiguous()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() + one.numel() == other.storage_offset()
        and (one.numel() % BLOCK == 0) == (other.numel() % BLOCK == 0)
    )


def _flat(run: Named) -> torch.Tensor:
    """Return all elements of a run as one tensor, a view."""
    first = run[0][1]
    if len(run) == 1:
        return first
    return first.as_strided((sum(tensor.numel() for _, tensor in run),), (1,))
