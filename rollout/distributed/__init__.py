"""The layout of ranks, and collectives with deadlines.  It imports `rollout.core` and `rollout.kernels`."""
