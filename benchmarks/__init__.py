"""Benchmarks: ratios within one interleaved run, next to the floor measured in the same run.  Not tests."""

import os

# They measure the CPU, also on a machine with a GPU; `benchmarks.gpu` names its device.
os.environ.setdefault("LOCKSTEP_DEVICE", "cpu")
