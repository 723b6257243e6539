"""Refreshes that must be refused, as rows of one table: `tests/unit/weight_sync/test_refused_refresh.py`.

targets        an updater and an engine: the state that each serves, and a refresh whose trainer ignores answers
row            a row: the target, the fault, the reason of the refusal
updaters       rows of an updater: tensors in memory, folders, deltas, conversations
engines        rows of schedulers of one rank and of several, with requests under way
wrong_engines  updaters and engines that are wrong on purpose, and rows that must notice each
"""
