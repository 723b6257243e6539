"""Requests over time in the scheduler process: policy, steps, append-only records.

It imports `capture`, `rollout.core`, `rollout.distributed`, `rollout.drafts`, `rollout.executor`, `rollout.grammar`,
`rollout.layers`, `rollout.memory`, `rollout.model`, `rollout.sampling` and `rollout.text`.
"""
