"""The benchmark of a CUDA device with a model of the size of Qwen3-30B-A3B: `make bench-gpu`."""
