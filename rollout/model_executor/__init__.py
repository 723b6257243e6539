"""`rollout.model_executor`."""
