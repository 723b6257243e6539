"""`rollout.attention`."""
