"""Expert placement: load counts, planners, moves.  It imports no other package of this project.

Part of the package lockstep-rl.
"""
