"""`rollout.tokenizer_manager`: text in, token ids to the scheduler, token ids back, text out."""
