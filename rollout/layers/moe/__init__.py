"""`rollout.layers.moe`."""
