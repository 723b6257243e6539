"""The parts of the examples that train a real model against a live server: server, progress, last layers."""
