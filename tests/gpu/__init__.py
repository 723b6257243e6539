"""Tests that need a CUDA device: `make test-gpu`, or `python -m tests.gpu --dry-run` for their code on a CPU."""
