"""`rollout.entrypoints`."""
