"""The attention backends.  It imports `rollout.core` and `rollout.memory`."""
