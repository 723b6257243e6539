"""The dashboard: its page, its history and its queries.

It imports `capture`, `rollout.core`, `rollout.http` and `rollout.tokenizer_manager`.
"""
