"""A small trained model as an ordinary checkpoint: SmolLM2-135M-Instruct, which a Python package brings as GGUF."""
