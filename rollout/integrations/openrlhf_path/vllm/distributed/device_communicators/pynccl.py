"""Stands in for `vllm.distributed.device_communicators.pynccl`."""

from rollout.integrations.openrlhf import PyNcclCommunicator

__all__ = ["PyNcclCommunicator"]
