"""LoRA adapters as PEFT stores them: configuration, names of tensors, folders; nothing here knows a model's layers.

It imports `weight_sync` and `rollout.core`.
"""
