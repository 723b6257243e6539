"""`rollout.demo`."""
