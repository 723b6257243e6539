"""`GrammarCompiler`: matchers of grammars, compiled once for equal content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from rollout.core.grammar import Grammar
from rollout.grammar.builder import GrammarBuilder
from rollout.grammar.guard import GrammarGuard
from rollout.grammar.library import load
from rollout.grammar.matcher import Matcher
from rollout.grammar.vocabulary import GrammarVocabulary

MAX_ENTRIES = 128
MAX_CACHED_BYTES = 4 * 1024 * 1024  # of text; compiled grammars take some times as much


class GrammarCompiler:
    """Compiles grammars for the vocabulary of one model.  The latest ones are kept, by content.

    The library and the vocabulary are loaded when the first grammar comes.  A compile has no deadline: `check` is
    called before, by the process that takes the request in.
    """

    def __init__(
        self,
        vocabulary: Callable[[], GrammarVocabulary],
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        self._builder = GrammarBuilder(vocabulary)
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._cache: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._num_bytes = 0
        self._guard = GrammarGuard(vocabulary)

    def check(self, grammar: Grammar) -> None:
        """Check a grammar in a process of its own, within a second once this runs; any thread may call this.

        Raises `BadRequest`, in one line, for a grammar that is wrong, or over a limit of size, steps or time;
        `UnsupportedFeature` without the library; `Unavailable` if the machine is too busy.
        """
        load()
        self._guard.check(grammar)

    def start(self) -> None:
        """Start the process that checks, so that the first grammar need not wait; any thread may call this.

        Raises `UnsupportedFeature` without the library, `Unavailable` if it does not start.
        """
        load()
        self._guard.start()

    def close(self) -> None:
        """End the process that checks."""
        self._guard.close()

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the beginning of the grammar.

        Raises `BadRequest`, in one line, for a grammar that is wrong or over a limit, `UnsupportedFeature` without the
        library.
        """
        found = self._cache.get(grammar)
        if found is not None and found.tables.is_full:
            self._drop(grammar)
            found = None
        if found is None:
            found = self._builder.build(grammar)
            self._keep(grammar, found)
        else:
            self._cache.move_to_end(grammar)
        return found.copy()

    @property
    def num_cached(self) -> int:
        return len(self._cache)

    def _keep(self, grammar: Grammar, matcher: Matcher) -> None:
        self._cache[grammar] = matcher
        self._num_bytes += len(grammar.text)
        while len(self._cache) > self._max_entries or (self._num_bytes > self._max_bytes and len(self._cache) > 1):
            self._drop(next(iter(self._cache)))

    def _drop(self, grammar: Grammar) -> None:
        del self._cache[grammar]
        self._num_bytes -= len(grammar.text)
