"""vLLM's dialect: generation, control, weights."""
