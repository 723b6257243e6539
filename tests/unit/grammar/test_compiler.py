"""Grammars of every kind against plain judges, their ends, the cache's bound, and hostile ones.

Texts are drawn by following random allowed tokens; `jsonschema`, `re` and the list of choices judge them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from rollout.core.errors import BadRequest, Unavailable, UnsupportedFeature
from rollout.core.grammar import Grammar
from rollout.core.sampling_params import SamplingParams
from rollout.grammar import guard
from rollout.grammar.compiler import GrammarCompiler
from rollout.grammar.guard import GrammarGuard
from rollout.grammar.guard_process import BUSY, COSTLY, ENOUGH_SECONDS, SLOW, answer_to
from rollout.grammar.restriction import Restriction
from rollout.grammar.rows import RestrictedRows
from rollout.grammar.vocabulary import GrammarVocabulary
from tests.tiny_tokenizer import write_tiny_tokenizer

VOCAB = 300  # some more ids than the tokenizer has
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bé"]},
        "count": {"type": "integer", "minimum": -3, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "count"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"const": 7}, "end": "</f>"}],
    "triggers": ["<f="],
}


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler(backend: Tokenizer) -> Iterator[GrammarCompiler]:
    ends = [backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>"), 10**6]
    compiler = GrammarCompiler(lambda: GrammarVocabulary.of(backend, VOCAB, ends))
    yield compiler
    compiler.close()


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def allowed_ids(restriction: Restriction) -> list[int]:
    words = np.empty(-(-VOCAB // 32), dtype=np.int32)
    RestrictedRows([restriction], words[None]).write()
    return np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def restriction_of(compiler: GrammarCompiler, backend: Tokenizer, grammar: Grammar, **params: Any) -> Restriction:
    eos = [backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>")]
    settings = SamplingParams(**params)
    ends = [*([] if settings.ignore_eos else eos), *settings.stop_token_ids]
    return Restriction(VOCAB, settings, eos_ids=eos, end_ids=ends, matcher=compiler.matcher(grammar))


def drawn(compiler: GrammarCompiler, backend: Tokenizer, grammar: Grammar, seed: int) -> str | None:
    """Return a random text of the grammar, or None if it does not end within some tokens."""
    restriction, rng = restriction_of(compiler, backend, grammar), np.random.default_rng(seed)
    output: list[int] = []
    end = backend.token_to_id("<|im_end|>")
    for _ in range(120):
        allowed = allowed_ids(restriction)
        assert allowed and restriction.failure is None
        token = end if end in allowed and rng.random() < 0.5 else int(rng.choice(allowed))
        if token in (end, backend.token_to_id("<|endoftext|>")):
            return str(backend.decode(output, skip_special_tokens=False))
        output.append(token)
        restriction.feed([token])
    return None


def holds(judge: Any, text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), judge)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize(
    ("grammar", "judge"),
    [
        (schema(SCHEMA), lambda text: holds(SCHEMA, text)),
        (Grammar("json_object"), lambda text: holds({"type": "object"}, text)),
        (Grammar("regex", "^(ab|hello)[0-9]{2,3}x?$"), lambda text: re.fullmatch("(ab|hello)[0-9]{2,3}x?", text)),
        (Grammar("choice", '["hell", "hello", "é\\"/"]'), lambda text: text in ("hell", "hello", 'é"/')),
        (Grammar("ebnf", 'root ::= "(" root ")" | "x"'), lambda text: re.fullmatch(r"(\(*)x(\)*)", text)),
        (Grammar("structural_tag", json.dumps(TAG)), lambda text: "<f=" not in text or "<f=a>7</f>" in text),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_random_tokens_of_a_grammar_make_a_text_that_a_plain_judge_accepts(
    compiler: GrammarCompiler, backend: Tokenizer, grammar: Grammar, judge: Any
) -> None:
    compiler.check(grammar)
    texts = [text for seed in range(25) if (text := drawn(compiler, backend, grammar, seed)) is not None]
    assert texts, "no text ended"
    assert [text for text in texts if not judge(text)] == []


def test_a_document_that_the_judge_accepts_is_allowed_token_by_token(
    compiler: GrammarCompiler, backend: Tokenizer
) -> None:
    document = json.dumps({"kind": "bé", "count": -3, "tags": ["hel"]}, indent=1, ensure_ascii=False)
    restriction = restriction_of(compiler, backend, schema(SCHEMA))
    for token in backend.encode(document).ids:
        assert token in allowed_ids(restriction), backend.decode([token])
        restriction.feed([token])
    assert restriction.is_complete or backend.token_to_id("<|im_end|>") in allowed_ids(restriction)
    wrong = restriction_of(compiler, backend, schema(SCHEMA))
    wrong.feed(backend.encode('{"kind": "c').ids)
    assert wrong.failure is not None, "a text outside the schema was followed"


def test_an_end_token_of_the_request_does_not_end_a_text_in_the_middle(
    compiler: GrammarCompiler, backend: Tokenizer
) -> None:
    (end,), (other,) = backend.encode("a").ids, backend.encode("b").ids
    restriction = restriction_of(compiler, backend, Grammar("regex", "[a-c]{3,9}"), stop_token_ids=[end])
    for _ in range(3):
        allowed = allowed_ids(restriction)
        assert end not in allowed and other in allowed
        restriction.feed([other])
    assert end in allowed_ids(restriction)


def test_end_tokens_are_allowed_where_the_grammar_may_end_and_min_new_tokens_allows_it(
    compiler: GrammarCompiler, backend: Tokenizer
) -> None:
    ends = {backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>")}
    hello = backend.encode("hello").ids
    restriction = restriction_of(compiler, backend, Grammar("regex", "hello( x)?"))
    assert not ends & set(allowed_ids(restriction))
    restriction.feed(hello)
    assert ends < set(allowed_ids(restriction)) and not restriction.is_complete
    longer = restriction_of(compiler, backend, Grammar("regex", "hello( x)?"), min_new_tokens=len(hello) + 1)
    longer.feed(hello)
    assert not ends & set(allowed_ids(longer))
    longer.feed(backend.encode(" x").ids)
    assert ends == set(allowed_ids(longer))
    unending = restriction_of(compiler, backend, Grammar("regex", "hello"), ignore_eos=True)
    assert unending.ends_alone
    unending.feed(hello)
    assert unending.is_complete


def test_a_request_whose_next_token_has_nothing_left_fails_with_its_place_and_a_reason(
    compiler: GrammarCompiler, backend: Tokenizer
) -> None:
    hello = backend.encode("hello").ids
    restriction = restriction_of(compiler, backend, Grammar("regex", "hello"), min_new_tokens=9, max_new_tokens=9)
    restriction.feed(hello)
    assert len(allowed_ids(restriction)) >= VOCAB
    assert restriction.failure is not None
    place, reason = restriction.failure
    assert place == len(hello) and "min_new_tokens" in reason
    apart = restriction_of(compiler, backend, Grammar("regex", "hello"), allowed_token_ids=[0, 1])
    allowed_ids(apart)
    assert apart.failure is not None and "allowed_token_ids" in apart.failure[1]


def test_lists_of_allowed_and_forbidden_tokens_restrict_without_a_grammar() -> None:
    params = SamplingParams(allowed_token_ids=[3, 4, 64], bad_word_ids=[[4], [9, 3]])
    restriction = Restriction(VOCAB, params, eos_ids=[7], end_ids=[7])
    assert allowed_ids(restriction) == [3, 64]
    restriction.feed([9])
    assert allowed_ids(restriction) == [64]
    restriction.feed([3])
    assert allowed_ids(restriction) == [3, 64]


def test_all_rows_of_a_step_get_the_sets_of_plain_set_arithmetic(compiler: GrammarCompiler, backend: Tokenizer) -> None:
    eos = {backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>")}
    letters = backend.encode("ab").ids
    regex = Grammar("regex", "[a-c]{2,9}")
    asks: list[tuple[Grammar, dict[str, Any]]] = [
        (regex, {}),
        (regex, {"stop_token_ids": [letters[0]]}),
        (regex, {"min_new_tokens": 4}),
        (regex, {"ignore_eos": True, "bad_word_ids": [[letters[1]]]}),
        (schema(SCHEMA), {"allowed_token_ids": list(range(0, VOCAB, 2))}),
        (regex, {"min_new_tokens": 9, "max_new_tokens": 9, "allowed_token_ids": [VOCAB - 1]}),
    ]
    rows = [restriction_of(compiler, backend, grammar, **params) for grammar, params in asks]
    matchers = [compiler.matcher(grammar) for grammar, _ in asks]
    words = np.zeros((len(asks), -(-VOCAB // 32)), dtype=np.int32)
    together = RestrictedRows(rows, words)
    for fed in range(4):
        together.write()
        sets = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
        for i, (_, params) in enumerate(asks):
            ends = set(params.get("stop_token_ids", ())) | (set() if params.get("ignore_eos") else eos)
            one = np.zeros(words.shape[1], dtype=np.int32)
            matchers[i].allowed(one)
            expected = set(np.unpackbits(one.view(np.uint8), bitorder="little")[:VOCAB].nonzero()[0].tolist())
            expected = expected - eos - ends | (ends if matchers[i].may_end else set())
            expected &= set(params.get("allowed_token_ids", range(VOCAB)))
            expected -= {word[0] for word in params.get("bad_word_ids", ())}
            expected -= ends if fed < params.get("min_new_tokens", 0) else set()
            assert set(sets[i].nonzero()[0].tolist()) == (expected or set(range(VOCAB))), (fed, asks[i])
            assert (rows[i].failure is None) == bool(expected)
            if i != 4:
                matchers[i].advance(letters[1])
                rows[i].feed([letters[1]])


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema({"type": "nope"}), "nope"),
        (schema([]), "object"),
        (schema(False), "false"),
        (Grammar("json_schema", "{"), "not JSON"),
        (schema({"$ref": "http://localhost/x"}), "registry"),
        (Grammar("regex", "a(b"), "unclosed"),
        (Grammar("regex", r"(a)\1"), "backreferences"),
        (Grammar("ebnf", "root ::= other"), "other"),
        (Grammar("choice", "[]"), "at least one"),
        (Grammar("structural_tag", '{"structures": 3}'), "triggers"),
    ],
)
def test_a_wrong_grammar_is_refused_in_one_line(compiler: GrammarCompiler, grammar: Grammar, reason: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(reason)) as caught:
        compiler.check(grammar)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


DEEP: dict[str, Any] = {}
for _ in range(100):
    DEEP = {"items": DEEP}
HOSTILE = {
    "a deep schema": schema(DEEP),
    "many values": schema({"enum": [0] * 25_000}),
    "a large text": Grammar("regex", "a" * 100_000),
    "brackets": Grammar("json_schema", "[" * 60_000),
    "patterns that must all hold": schema({"allOf": [{"pattern": f".*a.{{{n}}}"} for n in range(5, 30)]}),
    "many alternatives of alternatives": schema(
        {"allOf": [{"anyOf": [{"properties": {f"{i}-{j}": True}} for j in range(8)]} for i in range(8)]}
    ),
    "a reference to itself": schema({"$ref": "#"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_the_next_one_is_checked(compiler: GrammarCompiler, name: str) -> None:
    with pytest.raises(BadRequest):
        patient(lambda: compiler.check(HOSTILE[name]))
    compiler.check(Grammar("regex", f"[{len(name)}]"))


def patient(check: Callable[[], None]) -> None:
    """Repeat a check where the machine was too busy with others' work."""
    for _ in range(20):
        with contextlib.suppress(Unavailable):
            return check()
    raise AssertionError("the machine is always too busy")


def test_the_process_outlives_a_grammar_that_uses_up_its_time(compiler: GrammarCompiler) -> None:
    compiler.start()
    process = compiler._guard._process
    hostile = schema({"allOf": [{"pattern": f".*b.{{{n}}}"} for n in range(5, 30)]})
    with pytest.raises(BadRequest, match="more than"):
        patient(lambda: compiler.check(hostile))
    compiler.check(Grammar("regex", "another"))
    assert process is not None and compiler._guard._process is process


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
def test_a_start_that_is_cut_fails_unless_the_compiler_closed_meanwhile(
    compiler: GrammarCompiler, is_closed: bool
) -> None:
    vocabulary = compiler._builder._vocabulary

    def cut() -> GrammarVocabulary:
        process = starting._guard._process
        assert process is not None
        starting.close() if is_closed else process.kill()
        return vocabulary

    starting = GrammarCompiler(cut)
    if is_closed:
        starting.start()
    else:
        with pytest.raises(Unavailable, match="does not start"):
            starting.start()
    assert starting._guard._process is None


def test_grammars_are_checked_beside_more_open_files_than_select_takes(compiler: GrammarCompiler) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while stack.enter_context(open(os.devnull)).fileno() < 1024:
            pass
        fresh = GrammarCompiler(lambda: compiler._builder._vocabulary)
        stack.callback(fresh.close)
        fresh.check(Grammar("regex", "many files"))


class _Builder:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def build(self, grammar: Grammar) -> None:
        self._work()


def _spin() -> None:
    while True:
        pass


def _spin_and_wait() -> None:
    while time.process_time() < ENOUGH_SECONDS + 0.1:
        pass
    time.sleep(60)


def _refuse() -> None:
    raise BadRequest("it is wrong")


@pytest.mark.parametrize(
    ("work", "answer"),
    [
        (lambda: None, b"A"),
        (_refuse, b"Rit is wrong"),
        (_spin, b"C"),
        (lambda: time.sleep(60), b"B"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), b"C"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), b"S"),
        (_spin_and_wait, b"S"),
    ],
    ids=["accepted", "refused", "uses the processor", "gets no processor", "ends", "is ended", "gets too little of it"],
)
def test_a_grammar_is_answered_in_time_whatever_its_compile_does(work: Callable[[], None], answer: bytes) -> None:
    for _ in range(20):  # where others work, the child may get too little of the processor
        begin = time.monotonic()
        found = answer_to(_Builder(work), Grammar("regex", "a"))  # type: ignore[arg-type]
        assert time.monotonic() - begin < 10
        if found == answer:
            break
        assert found in (b"B", b"S")
    assert found == answer or (answer, found) == (b"C", b"S"), "the clock is the first to end one that has half a core"


@pytest.mark.parametrize(("answer", "asked"), [(COSTLY, 1), (SLOW, 2), (BUSY, 3)])
def test_a_verdict_that_the_load_of_the_machine_decided_is_not_kept(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, answer: bytes, asked: int
) -> None:
    """A costly grammar is not compiled again, a slow one after some time, and one on a busy machine at once."""
    tried, now = [], [1000.0]
    verdicts = GrammarGuard(lambda: compiler._builder._vocabulary)
    monkeypatch.setattr(verdicts, "_running", lambda: None)
    monkeypatch.setattr(guard, "_exchange", lambda *_: tried.append(1) or answer)
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for seconds in (0, guard.SLOW_KEPT_S - 1, 2):
        now[0] += seconds
        with pytest.raises(Unavailable if answer == BUSY else BadRequest, match=r"busy|refused"):
            verdicts.check(Grammar("regex", "a"))
    assert len(tried) == asked


def test_the_cache_keeps_the_latest_grammars_by_content_within_its_bounds(compiler: GrammarCompiler) -> None:
    bounded = GrammarCompiler(lambda: compiler._builder._vocabulary, max_entries=3, max_bytes=2000)
    for number in range(5):
        bounded.matcher(Grammar("regex", f"a{number}"))
        bounded.matcher(Grammar("regex", f"a{number}"))
    assert bounded.num_cached == 3
    bounded.matcher(Grammar("regex", "b" * 1999))
    assert bounded.num_cached == 1


def test_copies_of_a_matcher_go_on_by_themselves_and_tokens_can_be_taken_back(
    compiler: GrammarCompiler, backend: Tokenizer
) -> None:
    first = compiler.matcher(Grammar("regex", "hello"))
    words, others = np.empty(10, dtype=np.int32), np.empty(10, dtype=np.int32)
    first.allowed(words)
    second = first.copy()
    for token in backend.encode("hello").ids:
        assert first.advance(token)
    assert first.may_end and not second.may_end
    first.rollback(len(backend.encode("hello").ids))
    for matcher in (first, second):
        matcher.allowed(others)
        assert (words == others).all()
    assert not second.advance(backend.token_to_id("END")) and second.error


def test_without_the_library_the_refusal_names_the_extra(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedFeature, match=re.escape("lockstep-rl[grammar]")):
        compiler.check(Grammar("json_object"))
