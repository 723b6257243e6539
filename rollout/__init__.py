"""`rollout`."""
