"""Routes and bodies: native, OpenAI and vLLM dialects, control verbs, metrics, the API page.

It imports `eplb`, `rollout.core`, `rollout.text` and `rollout.tokenizer_manager`.
"""
