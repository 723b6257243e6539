"""Routed experts: recording, keeping, encoding and forcing them.  A library of its own: needs torch and safetensors."""
