"""Faults in the tensors of a bucket before a transport takes them: in the first tensor, unless noted."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.faults.transports import Named

Change = Callable[[Named], Named]


def renamed(named: Named) -> Named:
    """Give the first tensor a name that the model does not have."""
    (name, tensor), *rest = named
    return [(f"{name}.other", tensor), *rest]


def reshaped(named: Named) -> Named:
    (name, tensor), *rest = named
    return [(name, tensor.unsqueeze(0)), *rest]


def retyped(named: Named) -> Named:
    """Convert the first tensor to int32, and move it to the end."""
    (name, tensor), *rest = named
    return [*rest, (name, tensor.to(torch.int32))]


def halved(named: Named) -> Named:
    """Convert the first tensor to float16, and move it to the end."""
    (name, tensor), *rest = named
    return [*rest, (name, tensor.half())]


def missing(named: Named) -> Named:
    return named[1:]


def with_value(value: float) -> Change:
    """Return a change that gives the last element of the first tensor this value."""

    def change(named: Named) -> Named:
        (name, tensor), *rest = named
        changed = tensor.clone()
        changed.view(-1)[-1] = value
        return [(name, changed), *rest]

    return change


with_nan = with_value(torch.nan)


def exchanged(named: Named) -> Named:
    """Exchange the names of two tensors of one shape, as when a list and its tensors are in different orders."""
    first: dict[tuple[int, ...], int] = {}
    for at, (name, tensor) in enumerate(named):
        other = first.setdefault(tuple(tensor.shape), at)
        if other != at:
            changed = list(named)
            changed[other], changed[at] = (named[other][0], tensor), (name, named[other][1])
            return changed
    raise AssertionError("no two tensors of one shape")
