"""Text and token ids: tokenizer files, chat templates, detokenizing.  It imports `rollout.core`."""
