"""The control verbs: weights, memory, experts, sessions, profiles.

It imports `eplb`, `weight_sync`, `rollout.adapters`, `rollout.core`, `rollout.distributed`, `rollout.executor`,
`rollout.families`, `rollout.memory`, `rollout.model` and `rollout.scheduler`.
"""
