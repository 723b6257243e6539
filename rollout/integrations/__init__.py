"""Integrations for frameworks that start their engine themselves: they call these instead of their own.

`sglang_launch`: SGLang's launch call and flags.  `verl`: a rollout replica.  `openrlhf`: the engine of its actors.
None of them is imported by the rest of the package.
"""
