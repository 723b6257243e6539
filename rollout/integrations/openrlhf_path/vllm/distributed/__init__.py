"""Stands in for `vllm.distributed`: the group between trainer and engines."""
