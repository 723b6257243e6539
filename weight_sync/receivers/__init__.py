"""Receivers: one transport a file; each yields named tensors and knows nothing of transactions."""
