"""GRPO of SmolLM2-135M-Instruct on word problems, against a live server on two cores."""
