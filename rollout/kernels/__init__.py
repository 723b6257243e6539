"""The operators: plain torch, C++ for the CPU, Triton for CUDA.  It imports `weight_sync` and `rollout.core`."""
