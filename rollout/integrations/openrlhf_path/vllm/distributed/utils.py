"""Stands in for `vllm.distributed.utils`."""

from rollout.integrations.openrlhf import StatelessProcessGroup

__all__ = ["StatelessProcessGroup"]
