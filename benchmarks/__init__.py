"""Benchmarks: ratios within one interleaved run, next to the floor measured in the same run.  Not tests."""
