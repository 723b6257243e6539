"""Restrictions of a request's tokens: grammars, lists of allowed tokens, forbidden words.

It imports `rollout.core` and `rollout.text`.
"""
