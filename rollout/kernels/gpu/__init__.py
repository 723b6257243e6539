"""`rollout.kernels.gpu`."""
