"""Programs that use the engine: run them from a clone of the repository."""
