"""Receivers: one transport a file; each yields named tensors."""
