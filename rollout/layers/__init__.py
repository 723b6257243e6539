"""The layers of a decoder: linear, norm, rotary, attention, router, experts, dispatchers.

It imports `capture`, `eplb`, `weight_sync`, `rollout.attention`, `rollout.core`, `rollout.distributed`,
`rollout.kernels` and `rollout.memory`.
"""
