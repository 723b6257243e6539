"""Sampling: from logits to tokens, log-probabilities and masks.  It imports `rollout.core` and `rollout.kernels`."""
