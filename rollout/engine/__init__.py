"""One engine put together, and the loop of a rank's process.

It imports `capture`, `eplb`, `weight_sync`, `rollout.adapters`, `rollout.attention`, `rollout.control`, `rollout.core`,
`rollout.distributed`, `rollout.drafts`, `rollout.executor`, `rollout.families`, `rollout.grammar`, `rollout.kernels`,
`rollout.layers`, `rollout.memory`, `rollout.model`, `rollout.sampling`, `rollout.scheduler` and `rollout.text`.
"""
