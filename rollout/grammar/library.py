"""The library of grammars, llguidance: an extra of the package, `lockstep-rl[grammar]`.

A mask costs it 23 us in the middle at a vocabulary of 49,152 tokens and 30 us at 151,936, with a schema of two objects.
xgrammar 0.2.9 takes 210 and 651 us for the same on the same machine, and 30 to 80 times as long to compile it.

The limits count steps and sizes, not seconds, so that all ranks decide alike.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rollout.core.errors import UnsupportedFeature

PACKAGE = "llguidance"
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # 20 ms
    "step_lexer_fuel": 100_000,  # 7 ms a mask
    "step_max_items": 50_000,  # 3 ms a mask
    "max_lexer_states": 20_000,  # 2 kB each
    "max_grammar_size": 200_000,
    "max_items_in_row": 2_000,
}


def installed_version() -> str | None:
    """Return the version of the library; None if it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def load() -> Any:
    """Return the library.  Raises `UnsupportedFeature` if it is not installed."""
    try:
        return importlib.import_module(PACKAGE)
    except ImportError:
        raise UnsupportedFeature(
            "grammars need the package llguidance, which is not installed: pip install 'lockstep-rl[grammar]'"
        ) from None


def limits(library: Any) -> Any:
    """Return the limits of every matcher."""
    return library.LLParserLimits(**_LIMITS, verbose_errors=False)


def new_matcher(library: Any, tokenizer: Any, source: str) -> Any:
    """Return a matcher of a grammar in the library's own form.  Errors are in it: see `error_of`."""
    return library.LLMatcher(tokenizer, source, log_level=0, limits=limits(library))


def error_of(matcher: Any) -> str:
    """Return the error of a matcher in one line; empty if it has none."""
    return one_line(matcher.get_error()) if matcher.is_error() else ""


def is_full(matcher: Any) -> bool:
    """Return whether a matcher has failed as its table of states is full: `max_lexer_states`."""
    return bool(matcher.is_error()) and "too many states" in matcher.get_error()


def one_line(text: str) -> str:
    """Return the text of a message in one line of at most 300 characters."""
    joined = " ".join(text.replace("\n", " ").split())
    return joined if len(joined) <= 300 else joined[:297] + "..."
