"""OpenAI's Responses endpoint, for agents that speak nothing else."""
