"""`rollout.models`."""
