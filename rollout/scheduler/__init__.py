"""`rollout.scheduler`."""
