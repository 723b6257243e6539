"""Reads the fields of requests that ask for a grammar."""

import json

import pytest

from rollout.core.errors import BadRequest, LockstepError, UnsupportedFeature
from rollout.core.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES, Grammar, grammar_in
from rollout.core.sampling_params import SamplingParams, sampling_params_from_dict

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
NAMED = {"name": "n", "strict": True, "schema": SCHEMA}
TAG = {"type": "structural_tag", "structures": [], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"json_schema": TEXT}, Grammar("json_schema", TEXT)),
        ({"json_schema": "$$ANY$$"}, Grammar("json_object")),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"structural_tag": json.dumps(TAG)}, Grammar("structural_tag", json.dumps(TAG))),
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"guided_regex": "a"}, Grammar("regex", "a")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a","b"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar("ebnf", 'start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
        ({"structured_outputs": {"json": TEXT, "regex": None}}, Grammar("json_schema", TEXT)),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False}}, Grammar("regex", "a")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
        ({"structured_outputs": {"grammar": "g"}}, Grammar("ebnf", "g")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"structural_tag": "{}"}}, Grammar("structural_tag", "{}")),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar("json_schema", TEXT),
        ),
        ({"response_format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, Grammar("json_schema", TEXT)),
        ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG, separators=(",", ":")))),
        ({"json_schema": None, "regex": None}, None),
        ({}, None),
    ],
)
def test_each_field_gives_its_grammar(fields, grammar):
    assert grammar_in(fields) == grammar
    if grammar is not None:
        assert grammar_in({"structured_outputs": grammar.structured_outputs()}) == grammar
    params, unknown = sampling_params_from_dict(fields)
    assert params.grammar == grammar and unknown == []
    assert params.is_restricted == params.filters == (grammar is not None)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"regex": "a", "ebnf": "b"}, BadRequest, "one grammar; it names ebnf and regex"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, BadRequest, "one grammar"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, BadRequest, "one grammar"),
        ({"structured_outputs": {"regex": ""}}, BadRequest, "empty"),
        ({"regex": 5}, BadRequest, "regex must be a text"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, BadRequest, "at most"),
        ({"regex": "\ud800"}, BadRequest, "surrogate"),
        ({"guided_json": {"const": "\ud800"}}, BadRequest, "surrogate"),
        ({"guided_json": [1]}, BadRequest, "guided_json must be an object"),
        ({"guided_choice": []}, BadRequest, "guided_choice must be a list"),
        ({"guided_choice": ["a", ""]}, BadRequest, "guided_choice must be a list"),
        ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, BadRequest, "guided_choice must be a list"),
        ({"structured_outputs": {}}, BadRequest, "names no grammar"),
        ({"structured_outputs": "a"}, BadRequest, "structured_outputs must be an object"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, UnsupportedFeature, "whitespace_pattern"),
        ({"response_format": {"type": "xml"}}, UnsupportedFeature, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, BadRequest, "response_format.schema must be an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, BadRequest, "json_schema.schema"),
        ({"response_format": 3}, BadRequest, "response_format must be an object"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_refused(fields, error, words):
    with pytest.raises(error, match=words):
        grammar_in(fields)
    with pytest.raises(error, match="sampling_params: "):
        sampling_params_from_dict(fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids must have 1"),
        ({"allowed_token_ids": [1, 10]}, r"allowed_token_ids must be in \[0, 10\)"),
        ({"bad_words": [" "]}, "a bad word"),
        ({"bad_words": ["a"] * 300}, "at most 256 bad_words"),
    ],
)
def test_lists_of_tokens_and_words_have_limits(fields, words):
    params, _ = sampling_params_from_dict(fields)
    with pytest.raises(LockstepError, match=words):
        params.validate(10)


def test_fields_that_are_made_of_others_are_not_read():
    params, unknown = sampling_params_from_dict({"grammar": {"kind": "regex"}, "bad_word_ids": [[1]]})
    assert params == SamplingParams() and unknown == ["grammar", "bad_word_ids"]
