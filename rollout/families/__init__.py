"""`rollout.families`."""
