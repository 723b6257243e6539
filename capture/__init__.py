"""Routes, sampling masks, log-probabilities and hidden states as values and on the wire.

It imports no other package of this project.  Part of the package lockstep-rl.
"""
