"""`rollout.distributed`."""
