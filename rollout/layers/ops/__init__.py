"""`rollout.layers.ops`."""
