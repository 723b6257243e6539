"""`rollout.sampling`."""
