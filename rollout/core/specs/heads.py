"""The head on top of a model's last hidden states, as the architecture's name and `config.json` state it.

    Qwen3ForCausalLM                 `lm_head`: logits over the vocabulary, so that it generates
    Qwen3ForSequenceClassification   `score`: a number for each label, of the last token
    Qwen3ForTokenClassification      `score` with a bias: the same of every token
    Qwen3Model                       nothing: the hidden states are the output, and names have no `model.`

As in transformers `modeling_layers`.  No torch here: the HTTP process reads it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Activation = Literal["softmax", "sigmoid", "identity"]

CAUSAL = "ForCausalLM"
_OF_SEQUENCES, _OF_TOKENS, _BARE = "ForSequenceClassification", "ForTokenClassification", "Model"
_ACTIVATIONS: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
# Tensors of a model without a head have no prefix, or that of the text model in one that also sees.
BARE_PREFIXES = (
    ("language_model.", "model."),
    *((f"{part}.", f"model.{part}.") for part in ("layers", "embed_tokens", "norm")),
)


@dataclass(frozen=True, kw_only=True)
class LabelsSpec:
    """A linear layer `score` from hidden states to a number for each of `labels`.

    `of_tokens`: every token has its own numbers, and the layer may have a bias.  `activation` makes probabilities of
    the numbers.  `pad_token_id`: what a caller may have filled the end of a sequence with.
    """

    labels: tuple[str, ...]
    of_tokens: bool
    has_bias: bool
    activation: Activation
    pad_token_id: int | None


Head = Literal["vocabulary", "none"] | LabelsSpec


def family_architecture(architecture: str) -> tuple[str, str]:
    """Return the architecture of the same decoder with an output head, and the ending of the name that it replaces.

    A text model's own name, as `Qwen3_5TextModel`, is that of its family.
    """
    for ending in (_OF_SEQUENCES, _OF_TOKENS, _BARE):
        if architecture.endswith(ending):
            return architecture.removesuffix(ending).removesuffix("Text") + CAUSAL, ending
    return architecture, CAUSAL


def head_of(ending: str, raw: Mapping[str, Any]) -> Head:
    """Return the head that an architecture with this ending has.  Raises `ValueError` for labels that do not fit.

    Without `problem_type` one number is taken for a logit, and several for the logits of one label among them, as in
    vLLM.
    """
    if ending not in (_OF_SEQUENCES, _OF_TOKENS):
        return "none" if ending == _BARE else "vocabulary"
    of_tokens = ending == _OF_TOKENS
    labels = _labels(raw)
    problem, pad = raw.get("problem_type"), raw.get("pad_token_id")
    if problem is not None and problem not in _ACTIVATIONS:
        raise ValueError(f"problem_type must be one of {', '.join(_ACTIVATIONS)}, got {problem!r}")
    default: Activation = "sigmoid" if len(labels) == 1 else "softmax"
    return LabelsSpec(
        labels=labels,
        of_tokens=of_tokens,
        has_bias=of_tokens and bool(raw.get("token_classification_bias", True)),
        activation=default if problem is None else _ACTIVATIONS[problem],
        pad_token_id=None if pad is None else int(pad),
    )


def _labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels in the order of their numbers; transformers has two where a configuration names none."""
    names, stated = raw.get("id2label"), raw.get("num_labels")
    if names is None:
        return tuple(f"LABEL_{index}" for index in range(2 if stated is None else int(stated)))
    if not isinstance(names, Mapping) or not names:
        raise ValueError(f"id2label must be an object with a name for each label, got {str(names)[:60]!r}")
    by_id = {int(index): str(name) for index, name in names.items()}
    if sorted(by_id) != list(range(len(by_id))):
        raise ValueError(f"id2label must number its {len(by_id)} labels from 0 on, got {sorted(by_id)[:8]}")
    if stated is not None and int(stated) != len(by_id):
        raise ValueError(f"num_labels is {stated}, but id2label has {len(by_id)} labels")
    return tuple(by_id[index] for index in range(len(by_id)))
