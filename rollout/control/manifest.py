"""The manifest of a weight update, as its message has it."""

from __future__ import annotations

from msgspec.structs import astuple

from rollout.core.messages.weights import BeginWeightUpdateReqInput
from weight_sync.manifest import Manifest, parse_manifest


def manifest_of(verb: BeginWeightUpdateReqInput) -> Manifest | None:
    """Return the tensors that a begin states, with their fingerprints; None where it states none.

    Raises `WeightRequestError`.
    """
    if not verb.has_manifest:
        return None
    key = verb.digest()
    if key is None:
        return Manifest.of(parse_manifest(map(astuple, verb.entries())))
    return Manifest.of_lists(lambda: verb.lists() or ([], [], [], None), verb.fingerprints(), key)
