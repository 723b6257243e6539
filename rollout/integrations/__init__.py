"""Entry points for frameworks that start their engine themselves: SGLang's launcher, verl's replica, OpenRLHF's engine.

It imports `capture`, `weight_sync`, `rollout.cli`, `rollout.client`, `rollout.core`, `rollout.http` and
`rollout.server`.
"""
