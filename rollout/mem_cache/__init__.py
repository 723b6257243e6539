"""`rollout.mem_cache`."""
