"""From the tensors of one call to logical tensors as the model will hold them, checked before any of it is stored.

    wire tensors -> pairs put together -> split -> content checked as it was sent -> converted -> checked again

    FP8 pair                                      its values are held
    plain tensor of one that is to be quantised   what its `HeldFormat` makes of it is held
    any other                                     held as it was sent

Each logical tensor is quantised by itself and as a whole, whatever part of it this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from weight_sync.content import Content, by_name
from weight_sync.errors import ContentError
from weight_sync.fingerprint import fingerprint
from weight_sync.fp8_blocks import scales_of
from weight_sync.fp8_wire import SCALE_SUFFIX, Pair, PairedTensors, value_metas
from weight_sync.held_format import AS_SENT, HeldFormats
from weight_sync.loading import (
    Announced,
    Arrival,
    ProvenPart,
    WeightLedger,
    check_content,
    is_finite,
    matching,
    split_tensors,
    split_wire,
)
from weight_sync.tensor_meta import LogicalWeights, TensorMeta


class Intake:
    """Of one refresh.  `stated`: fingerprints that the sender announced, by the names of logical tensors and scales.

    `quantised`: logical tensors that are held quantised.  `contents`: of what came.
    """

    def __init__(self, weights: LogicalWeights, stated: Mapping[str, int], quantised: HeldFormats = AS_SENT) -> None:
        self.contents: dict[str, Content] = {}
        self.pairs = PairedTensors(weights)
        self._weights = weights
        self._stated = stated
        self._quantised = quantised
        self._announced: Announced = {}

    def announce(self, metas: Sequence[TensorMeta]) -> None:
        """Check what is known of a bucket before it is received.  Raises as `value_metas` and `split_wire`."""
        values = value_metas(self._weights, metas)
        self._announced = dict(zip(values, split_wire(self._weights, values, cast=False), strict=True))

    def take(self, bucket: Iterable[tuple[str, torch.Tensor]], ledger: WeightLedger) -> list[Arrival]:
        """The logical tensors that are whole now, as they are to be held.

        Raises `ContentError`, and as `PairedTensors.take` and `split_tensors`.
        """
        tensors = self.pairs.take(bucket)
        named = [(tensor.name, tensor.content) for tensor in tensors]
        arrivals = split_tensors(self._weights, named, ledger, cast=False, announced=self._announced)
        pairs = {tensor.name: tensor.pair for tensor in tensors if tensor.pair is not None}
        found = self._plain([arrival for arrival in arrivals if arrival.wire_name not in pairs] if pairs else arrivals)
        for arrival in arrivals if pairs else ():
            if arrival.wire_name in pairs:
                found[arrival.name] = self._of_pair(arrival, pairs[arrival.wire_name])
        if self._quantised:
            arrivals = [self._quantise(arrival, found) for arrival in arrivals]
        self.contents |= found
        return arrivals

    def take_part(self, part: ProvenPart) -> None:
        """Note a part of a tensor, which is held as it was sent.  Raises `ContentError`."""
        assert part.name not in self._quantised, "its source refuses those that are quantised as a whole"
        matching({part.name: part.fingerprint}, self._stated)
        self.contents[part.name] = Content.plain(self._weights.metas()[part.name], part.fingerprint)

    def _plain(self, arrivals: Sequence[Arrival]) -> dict[str, Content]:
        """Content as it was sent, and taken to be held so."""
        metas = self._weights.metas()
        found = check_content([(arrival.name, arrival.content) for arrival in arrivals], self._stated)
        return {name: Content.plain(metas[name], value) for name, value in found.items()}

    def _of_pair(self, arrival: Arrival, pair: Pair) -> Content:
        meta = self._weights.metas()[arrival.name]
        if not is_finite(arrival.content):
            raise ContentError(f"values that are not finite in {arrival.name}")
        piece = arrival.piece
        of_scale = replace(piece, index=scales_of(piece.index, pair.weight.shape))
        halves = {meta.name: piece.of(pair.weight), f"{meta.name}{SCALE_SUFFIX}": of_scale.of(pair.scale)}
        sent = tuple(
            (TensorMeta(name, half.dtype, tuple(half.shape)), fingerprint(half)) for name, half in halves.items()
        )
        content = Content(sent, fingerprint(arrival.content))
        matching(by_name([content]), self._stated)
        return content

    def _quantise(self, arrival: Arrival, found: dict[str, Content]) -> Arrival:
        """The arrival as it is held, if that is not as it came; so noted in `found`."""
        sent, held = found[arrival.name].sent, self._quantised.get(arrival.name)
        if held is None or (len(sent) > 1 and not held.of_pairs):
            return arrival
        values = held.values(arrival.content)
        found[arrival.name] = Content(sent, fingerprint(values))
        return arrival._replace(content=values)
