"""Routed experts: recording, keeping, encoding and forcing them.  Needs torch and safetensors; knows no engine."""
