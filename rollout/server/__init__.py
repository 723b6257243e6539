"""The processes of a server: application, sockets, start and stop, and the in-process `Engine`.

It imports `rollout.core`, `rollout.dashboard`, `rollout.distributed`, `rollout.engine`, `rollout.families`,
`rollout.http`, `rollout.memory`, `rollout.scheduler`, `rollout.text` and `rollout.tokenizer_manager`.
"""
