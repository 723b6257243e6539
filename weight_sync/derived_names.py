"""Names of tensors that state dicts may hold and that no engine needs: a model computes them from its configuration.

    model.layers.0.self_attn.rotary_emb.inv_freq      frequencies of the rotation, and what is computed from them
    transformer.h.0.attn.bias, attn.masked_bias       the causal mask, and the value behind it
    embeddings.position_ids                           0, 1, 2 ...

Checkpoints saved by old versions of transformers have them, and so have trainers that send every buffer.  transformers
ignores them when it loads.  A model that does have a tensor of such a name is asked first.
"""

from __future__ import annotations

import re

_DERIVED = re.compile(
    r"(^|.*[._])(inv_freq|cos_cached|sin_cached|cos_sin_cache|masked_bias|position_ids)|(.*\.)?(attn|attention)\.bias"
)


def is_derived(name: str) -> bool:
    """Return whether a tensor of this name, which the model does not have, is computed from a configuration."""
    return _DERIVED.fullmatch(name) is not None
