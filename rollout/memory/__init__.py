"""Memory: KV slots, the prefix tree, rows of recurrent states, pages of windows, release to the system.

It imports `weight_sync`, `rollout.core` and `rollout.kernels`.
"""
