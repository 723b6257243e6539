"""Weight refresh: transactions, transports, fingerprints.  It imports no other package of this project.

Part of the package lockstep-rl.
"""
