"""The tiny models of `family_zoo` with the heads of classifiers, and without any head, as transformers builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from tests.family_zoo import random_weights, transformers_config

LABELS = {0: "bad", 1: "fair", 2: "good"}
PAD = 0
_GENERIC = {
    "ForSequenceClassification": GenericForSequenceClassification,
    "ForTokenClassification": GenericForTokenClassification,
}


def headed_model(name: str, ending: str, seed: int = 3, **changes: Any) -> Any:
    """Make transformers' model of a family with the head of an architecture's `ending`; "Model": without one.

    A family for which transformers has no such class gets its generic head on the family's model.
    """
    labels = changes.pop("id2label", LABELS)
    config = transformers_config(name, **changes, id2label=dict(labels), num_labels=len(labels))
    config._attn_implementation = config._experts_implementation = "eager"
    bare = transformers.AutoModel.from_config(config)
    model = bare if ending == "Model" else _class_of(type(bare), ending)(config)
    model = model.float().eval()
    random_weights(model, seed)
    return model


def headed_checkpoint(folder: Path, name: str, ending: str, seed: int = 3, **changes: Any) -> Any:
    """Write the checkpoint into `folder` and return the model."""
    model = headed_model(name, ending, seed, **changes)
    model.save_pretrained(folder)
    return model


def _class_of(bare: type, ending: str) -> Any:
    stem = bare.__name__.removesuffix("Model").removesuffix("Text")
    parent = next(base for base in bare.__mro__ if base.__name__.endswith("PreTrainedModel"))
    return type(stem + ending, (_GENERIC[ending], parent), {"__module__": bare.__module__})


def hidden_states(model: Any, prompt: list[int]) -> torch.Tensor:
    """Return the last hidden states [T, D] of a bare model."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).last_hidden_state[0]


def scores(model: Any, prompt: list[int]) -> torch.Tensor:
    """Return the numbers of all labels, [labels] or [T, labels]."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]
