"""`rollout.tokenizer_manager`."""
