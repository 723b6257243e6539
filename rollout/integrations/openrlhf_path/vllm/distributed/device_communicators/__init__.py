"""Stands in for `vllm.distributed.device_communicators`."""
