"""Routes and bodies: native, OpenAI, Anthropic and vLLM dialects, control verbs, metrics, the API page.

It imports `capture`, `eplb`, `rollout.core`, `rollout.text`, `rollout.tokenizer_manager` and `weight_sync`.
"""
