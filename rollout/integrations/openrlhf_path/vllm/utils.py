"""Stands in for `vllm.utils`."""

from rollout.integrations.openrlhf import random_uuid

__all__ = ["random_uuid"]
