"""The tables that the requests of one grammar share: one that fills them fails alone, or goes on with new ones."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from rollout.core.grammar import Grammar
from rollout.core.sampling_params import SamplingParams
from rollout.grammar import library
from rollout.grammar.compiler import GrammarCompiler
from rollout.grammar.matcher import Matcher
from rollout.grammar.restriction import Restriction
from rollout.grammar.rows import RestrictedRows
from rollout.grammar.vocabulary import GrammarVocabulary
from tests.tiny_tokenizer import write_tiny_tokenizer

VOCAB = 300
WORDS = -(-VOCAB // 32)
GRAMMAR = Grammar("regex", "[a-h]*[a-d][a-h]{16}z")
"""It has a state for each form of the last 17 letters."""


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


@pytest.fixture(scope="module")
def letters(backend: Tokenizer) -> list[int]:
    return [backend.token_to_id(letter) for letter in "abcdefgh"]


def new_compiler(backend: Tokenizer) -> GrammarCompiler:
    ends = [backend.token_to_id("<|im_end|>")]
    return GrammarCompiler(lambda: GrammarVocabulary.of(backend, VOCAB, ends))


def restriction_of(compiler: GrammarCompiler) -> Restriction:
    return Restriction(VOCAB, SamplingParams(), eos_ids=[], end_ids=[], matcher=compiler.matcher(GRAMMAR))


def allowed_ids(restriction: Restriction) -> list[int]:
    words = np.empty(WORDS, dtype=np.int32)
    RestrictedRows([restriction], words[None]).write()
    return np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def fed_beside_a_costly_one(compiler: GrammarCompiler, letters: list[int]) -> Restriction:
    """Return a restriction that goes on after a neighbour with the same grammar filled the tables and failed."""
    draw, slow, quick = random.Random(0), restriction_of(compiler), restriction_of(compiler)
    quick.feed([letters[0]])
    assert set(letters) <= set(allowed_ids(quick))  # the mask of the step in which another request fills the table
    for _ in range(40_000):
        allowed_ids(slow)
        if slow.failure is not None:
            break
        slow.feed([draw.choice(letters)])
    assert slow.failure is not None and "too many states" in slow.failure[1]
    assert slow.failure[0] == slow.num_fed, "the place of the next token, which nothing samples"
    for letter in letters:
        quick.feed([letter])
    return quick


def test_a_request_that_fills_the_tables_of_its_grammar_fails_alone(
    backend: Tokenizer, letters: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = restriction_of(new_compiler(backend))
    alone.feed([letters[0], *letters])
    monkeypatch.setitem(library._LIMITS, "max_lexer_states", 1000)
    compiler = new_compiler(backend)
    quick = fed_beside_a_costly_one(compiler, letters)
    assert (
        quick.failure is None and allowed_ids(quick) == allowed_ids(alone) and set(letters) <= set(allowed_ids(alone))
    )
    assert set(letters) <= set(allowed_ids(restriction_of(compiler))), "later requests begin anew"


def test_tables_that_no_request_leaves_let_a_neighbour_decide(
    backend: Tokenizer, letters: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong variant, which the test before catches."""
    monkeypatch.setattr(Matcher, "_has_new_tables", lambda self: False)
    monkeypatch.setitem(library._LIMITS, "max_lexer_states", 1000)
    assert fed_beside_a_costly_one(new_compiler(backend), letters).failure is not None


def test_a_long_text_fills_several_tables_and_has_the_masks_of_one_with_room(
    backend: Tokenizer, letters: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_room = new_compiler(backend).matcher(GRAMMAR)
    monkeypatch.setitem(library._LIMITS, "max_lexer_states", 1000)
    compiler = new_compiler(backend)
    draw, token_ids, begun = random.Random(1), list[int](), list[int]()
    matcher = compiler.matcher(GRAMMAR)
    begin = matcher.tables.begin
    matcher.tables.begin = lambda: begun.append(len(token_ids)) or begin()
    mask, expected = np.empty(WORDS, dtype=np.int32), np.empty(WORDS, dtype=np.int32)
    for _ in range(700):
        matcher.allowed(mask)
        with_room.allowed(expected)
        assert (mask == expected).all()
        token_ids.append(draw.choice(letters))
        assert matcher.advance(token_ids[-1]) and with_room.advance(token_ids[-1]), matcher.error
    assert len(begun) > 1 and compiler.matcher(GRAMMAR).tables is not matcher.tables
    for each in (matcher, with_room):
        each.rollback(3)
        assert each.copy().advance(token_ids[-3])
    matcher.allowed(mask)
    with_room.allowed(expected)
    assert (mask == expected).all() and not matcher.error


@pytest.mark.parametrize("for_proposals", [True, False], ids=["proposals", "wrong variant"])
def test_tokens_that_are_proposed_do_not_compile_a_grammar_again(
    backend: Tokenizer, letters: list[int], monkeypatch: pytest.MonkeyPatch, for_proposals: bool
) -> None:
    """In one step proposals follow a copy, and the request its own restriction, with tables that others filled."""
    monkeypatch.setitem(library._LIMITS, "max_lexer_states", 1000)
    compiler, draw, begun = new_compiler(backend), random.Random(0), list[int]()
    own = restriction_of(compiler)
    own.feed([letters[0]])
    filling = restriction_of(compiler)
    tables = filling._matcher.tables
    begin = tables.begin
    tables.begin = lambda: begun.append(1) or begin()
    while not begun:
        allowed_ids(filling)
        filling.feed([draw.choice(letters)])
    begun.clear()
    proposed = own.copy(for_proposals=for_proposals)
    for letter in letters * 3:
        allowed_ids(proposed)
        proposed.feed([letter])
    assert (proposed.failure is not None) == for_proposals, "the tables that the copy shares are full"
    for letter in letters * 3:
        assert set(letters) <= set(allowed_ids(own))
        own.feed([letter])
    assert own.failure is None and len(begun) == (1 if for_proposals else 2)
