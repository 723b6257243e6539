"""Memory of sequences, and its release: KV slots, the prefix tree, rows of recurrent states, pages of windows.

It imports `weight_sync`, `rollout.core` and `rollout.kernels`.
"""
