"""Mutated bodies against a real server: no 5xx, no ended server, no growing memory.

    good bodies (seeds.py) -> mutations (mutate.py) -> a server under limits (run.py) -> what was wrong

A body is a function of the seed and its number, so that a failure can be played again alone.
"""
