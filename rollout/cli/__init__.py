"""The command `lockstep`: its subcommands, and parsers that need no torch.

It imports `rollout.core`, `rollout.dashboard`, `rollout.kernels` and `rollout.server`.
"""
