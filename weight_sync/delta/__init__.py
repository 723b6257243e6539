"""Deltas: a weight version as what changed since the one before it; the forms, the folders, the local checkpoint."""
