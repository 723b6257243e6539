"""Stands where OpenRLHF imports vLLM from: the engine is a Lockstep server."""

from rollout.integrations.openrlhf import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

__all__ = ["AsyncEngineArgs", "AsyncLLMEngine", "SamplingParams", "__version__"]
__version__ = "0.29.0"  # whose behaviour OpenRLHF may count on
