"""The manifest of a weight update, read from its message on the I/O thread."""

from __future__ import annotations

from msgspec.structs import astuple

from rollout.core.messages.weights import BeginWeightUpdateReqInput
from weight_sync.errors import WeightRequestError
from weight_sync.fingerprint import parse_fingerprint
from weight_sync.tensor_meta import TensorMeta, parse_metas
from weight_sync.transaction import parse_manifest

_DIGITS = 16


def manifest_of(verb: BeginWeightUpdateReqInput) -> list[tuple[TensorMeta, int | None]] | None:
    """Return the tensors that a begin states, with their fingerprints; None where it states none.

    Raises `WeightRequestError`.
    """
    if not verb.has_manifest:
        return None
    lists = verb.lists()
    if lists is None:
        return parse_manifest(map(astuple, verb.entries()))
    metas, digits = parse_metas(*lists), verb.fingerprints()
    if digits is None:
        return [(meta, None) for meta in metas]
    if len(digits) != _DIGITS * len(metas):
        raise WeightRequestError(
            f"fingerprints must be {_DIGITS} hex digits for each of {len(metas)} tensors, got {len(digits)} characters"
        )
    starts = range(0, len(digits), _DIGITS)
    return [(meta, parse_fingerprint(digits[start : start + _DIGITS])) for meta, start in zip(metas, starts)]
