"""Requests of the HTTP process on their way to the scheduler, and answers on their way back.

It imports `capture`, `rollout.core`, `rollout.grammar` and `rollout.text`.
"""
