"""`rollout.core`."""
