"""Shapes and dtypes of the operators' results without computing them, for tracing.  Knows nothing else of them."""

from __future__ import annotations


def register_fakes() -> None:
    """Call once, after the operators are loaded."""
