"""The engine, its clients and its command.  Part of the package lockstep-rl."""
