"""Operators for CUDA, each in the module of its name: Triton kernels, and the function that launches them.

`compile_cases` of a module returns configurations of its kernels.  Each has a name, the kernel, types of the arguments
that are not constant, constants, warps and stages.
"""
