"""The signatures of the installed package FlashInfer against the stand-in's; its kernels are tested in `tests/gpu`."""

from __future__ import annotations

import pytest

from tests.flashinfer_signatures import differences

pytestmark = pytest.mark.full


def test_signatures_are_those_of_the_stand_in() -> None:
    library = pytest.importorskip("flashinfer", reason="the package flashinfer is not installed")
    assert not differences(library)
