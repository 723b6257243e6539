"""`rollout.layers`."""
