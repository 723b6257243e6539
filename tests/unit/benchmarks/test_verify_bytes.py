"""The bytes of a verify step: sizes that are known, and the tables in docs/benchmarks/drafts.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.verify_bytes import BATCHES, CONTEXT, QWEN3_30B_A3B, pays_from, table

DOCS = Path(__file__).parents[3] / "docs" / "benchmarks" / "drafts.md"


def test_the_sizes_are_the_ones_that_the_card_states() -> None:
    sizes = QWEN3_30B_A3B
    every = sizes.dense_bytes + sizes.layers * sizes.experts * 3 * sizes.hidden * sizes.inner * 2
    assert every / 2 + sizes.vocabulary * sizes.hidden == pytest.approx(30.5e9, rel=0.01)  # the embedding is not read
    assert sizes.token_bytes == 98304
    assert sizes.touched(1) == pytest.approx(8) and sizes.touched(2) == pytest.approx(15.5)


def test_a_step_pays_from_where_its_tokens_are_worth_its_bytes() -> None:
    assert pays_from(1.5, 1) == pytest.approx(0.5) and pays_from(1.75, 2) == pytest.approx(0.5)
    assert pays_from(2.5, 1) is None


def test_rows_that_read_kv_by_themselves_read_more() -> None:
    for batch in BATCHES:
        for depth in range(1, 8):
            once, each = (QWEN3_30B_A3B.step_bytes(batch, depth, CONTEXT, by_row=by_row) for by_row in (False, True))
            assert each - once == pytest.approx(batch * depth * CONTEXT * QWEN3_30B_A3B.token_bytes)


@pytest.mark.parametrize("batch", BATCHES)
def test_the_documentation_has_the_tables(batch: int) -> None:
    assert "\n".join(table(QWEN3_30B_A3B, batch, CONTEXT)) in DOCS.read_text(encoding="utf-8")
