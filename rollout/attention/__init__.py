"""The attention backends.  It imports `rollout.core`, `rollout.memory`, `rollout.distributed` and `rollout.kernels`."""
