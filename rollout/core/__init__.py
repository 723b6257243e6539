"""Records that all packages share: settings, messages, errors, specifications of models, `ForwardBatch`.

It imports `eplb`.
"""
