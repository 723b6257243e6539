"""Routes and bodies: native, OpenAI, Anthropic and vLLM dialects, control verbs, metrics, the API page.

It imports `capture`, `eplb`, `rollout.core`, `rollout.text` and `rollout.tokenizer_manager`.
"""
