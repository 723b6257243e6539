"""Routes, sampling masks and log-probabilities as values and on the wire.

It imports no other package of this project.  Part of the package lockstep-rl.
"""
