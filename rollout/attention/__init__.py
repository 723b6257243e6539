"""The attention backends.  It imports `rollout.core`, `rollout.memory` and `rollout.kernels`."""
