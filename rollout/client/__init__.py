"""`rollout.client`."""
