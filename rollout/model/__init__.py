"""The decoder, its weights by name, and `ModelState`, sole owner of weights and version.

It imports `eplb`, `weight_sync`, `rollout.adapters`, `rollout.core`, `rollout.distributed`, `rollout.kernels`,
`rollout.layers` and `rollout.memory`.
"""
