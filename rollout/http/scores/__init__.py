"""Doors for embeddings, classification and scores: bodies, and answers made of pooled rows."""
