"""As `vllm.distributed`: the group between trainer and engines."""
