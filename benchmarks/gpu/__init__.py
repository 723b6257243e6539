"""What a CUDA device makes of a model of the size of Qwen3-30B-A3B: `make bench-gpu`."""
