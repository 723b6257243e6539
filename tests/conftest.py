"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis.internal.conjecture import providers

# Hypothesis draws constants that it finds in the modules of this project that happen to be loaded: a derandomized test
# would play other examples in the whole run than alone.
providers._get_local_constants = providers.Constants  # type: ignore[assignment]


@pytest.fixture(autouse=True, scope="session")
def _one_compute_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and threads that wait for one another are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
