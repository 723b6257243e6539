"""Operators for CUDA: Triton kernels, and the functions of `rollout.kernels.schemas` that launch them."""
