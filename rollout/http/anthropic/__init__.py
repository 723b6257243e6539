"""Anthropic's Messages endpoint, for agents that speak nothing else."""
