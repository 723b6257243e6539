"""As `vllm.distributed.device_communicators`."""
