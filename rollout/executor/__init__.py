"""Runs the model: owns its state, builds its inputs, records what its routers chose."""
