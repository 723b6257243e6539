"""`make bench-peers`: Lockstep and other CPU engines on the same weights and prompts, in one interleaved run."""
