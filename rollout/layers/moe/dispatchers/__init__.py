"""`rollout.layers.moe.dispatchers`."""
