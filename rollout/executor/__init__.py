"""One forward: its inputs, `ModelRunner`, recorded calls, captured graphs.

It imports `capture`, `rollout.attention`, `rollout.core`, `rollout.distributed`, `rollout.layers`, `rollout.memory`,
`rollout.model` and `rollout.sampling`.
"""
