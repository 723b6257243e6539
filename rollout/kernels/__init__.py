"""`rollout.kernels`."""
