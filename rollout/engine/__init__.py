"""One engine: its parts put together, and the loop of a rank's process."""
